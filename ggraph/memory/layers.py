"""Which layers remember how: the stores of a context with their tensors, grouped by what the layers have in common.

In: hyperparameters and context parameters. Out: `LayerMemory`, a `Memory` whose stores have tensors. Layers without a window
form one KV group, layers with one another, smaller one, recurrent layers a group of state rows.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ..backend import Backend
from ..batch import Seqs
from ..cparams import CParams
from ..hparams import HParams
from ..size import Size
from ..tensor import Tensor
from . import Memory, Step
from .cache import Group, KVCache, StateCache
from .cross import Cross, Hidden
from .kv import N_PAD, KVStore
from .recurrent import RecurrentStore


class LayerMemory(Memory):
    """`groups[i]` holds the tensors of store i: the KV groups first (`kv`), then the recurrent layers' rows (`rs`)."""

    def __init__(self, hp: HParams, cp: CParams):
        self.arch = hp.arch
        attention = [il for il in hp.layers if hp.has_kv(il)]
        window = [il for il in attention if hp.is_swa(il)]
        full = [il for il in attention if not hp.is_swa(il)]
        recurrent = [il for il in hp.layers if hp.is_recurrent(il)]
        self.kv: list[KVCache] = []
        self.rs: StateCache | None = None
        if full:
            self._add(full, hp, cp, KVStore(cp.n_ctx_seq, cp.n_seq_max, cp.n_stream))
        if window:
            store = KVStore(window_size(hp, cp), cp.n_seq_max, cp.n_stream, window=hp.n_swa, swa_type=hp.swa_type)
            self._add(window, hp, cp, store)
        if recurrent:
            n_tail = len(hp.ngrams.factors) - 1 if hp.ngrams else 0
            self.rs = StateCache(len(self.kv), RecurrentStore(cp.n_seq_max, cp.n_rollback, n_tail), recurrent, hp)
        self.groups: list[Group] = [*self.kv, *([self.rs] if self.rs else [])]
        self.can_shift = hp.can_shift or not self.kv
        super().__init__([g.store for g in self.groups], cp.n_seq_max, cp.n_ubatch)
        self.cross = Cross() if hp.encoder is not None else None
        self.n_cross = Size.variable("n_cross", cp.n_seq_max * cp.n_ctx)
        if self.cross is not None:
            self.mirrors.append(self.cross.copy)

    def _add(self, layers: list[int], hp: HParams, cp: CParams, store: KVStore) -> None:
        indexed = [il for il in layers if cp.chooses_blocks(hp, il)]
        self.kv.append(KVCache(len(self.kv), store, layers, hp, cp.type_k, cp.type_v, indexed))

    def encoded(self, seq_ids: Sequence[Seqs], rows: Hidden) -> None:
        """An encoder made these hidden states [n, n_embd] of rows of these sequences, for a decoder."""
        assert self.cross is not None
        self.cross.put(seq_ids, rows)

    def kv_of(self, il: int) -> int:
        """The number of the KV group of layer il."""
        return next(i for i, g in enumerate(self.kv) if il in g.k)

    def tensors(self) -> Iterable[Tensor]:
        return (t for g in self.groups for t in g.tensors())

    @property
    def nbytes(self) -> int:
        return sum(g.nbytes for g in self.groups)

    def alloc(self, home: Callable[[int], Backend]) -> None:
        """`home`: the backend of each layer."""
        for g in self.groups:
            g.alloc(home)

    def place(self, home: Callable[[int], Backend], on: Backend) -> int:
        """Bytes that `alloc` would take on one backend; nothing is allocated."""
        return sum(g.place(home).get(on, 0) for g in self.groups)

    def wipe(self, seq: int) -> None:
        """Take a sequence out and zero the cells that it alone had: a NaN in one would spoil all, where attention multiplies what
        is hidden by zero."""
        self.check(seq)
        for g in self.kv:
            cells = g.store.exclusive(seq)
            rows = np.sort(cells) + g.store.stream(seq) * g.store.size
            for t in g.tensors():
                g.write_rows(t, rows, np.zeros((len(rows), t.nb[1]), np.uint8))
        self.seq_rm(seq)

    def free(self) -> None:
        for g in self.groups:
            g.free()

    def home(self, tensor: Tensor) -> Backend | None:
        """Where a cache lives; None for any other tensor."""
        return next((g.home[tensor] for g in self.groups if tensor in g.home), None)

    def sizes(self, step: Step) -> dict[str, int]:
        """Values of the groups' size variables, between `apply` and `commit` of the step."""
        values: dict[str, int] = {}
        for g in self.groups:
            values.update(g.sizes(step))
        if self.cross is not None:
            values["n_cross"] = self.cross.count(step.ubatch.seq.tolist())
        return values


def window_size(hp: HParams, cp: CParams) -> int:
    """Cells of a window group: what its sequences see, and room for one ubatch."""
    if cp.swa_full:
        return cp.n_ctx_seq
    n = hp.n_swa * (cp.n_seq_max if cp.kv_unified else 1) + cp.n_ubatch
    return min(cp.n_ctx_seq, -(-n // N_PAD) * N_PAD)
