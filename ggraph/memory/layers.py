"""Which layers remember how: the stores of a context with their tensors, grouped by what the layers have in common.

In: hyperparameters and context parameters. Out: `LayerMemory`, a `Memory` whose stores have tensors. Layers without a window
form one KV group, layers with one another, smaller one.
"""
from __future__ import annotations

from collections.abc import Iterable

from ..backend import Backend
from ..cparams import CParams
from ..hparams import HParams
from ..tensor import Tensor
from . import Memory, Step
from .cache import KVCache
from .kv import N_PAD, KVStore


class LayerMemory(Memory):
    """`kv[i]` are the KV groups; store i of the memory is the bookkeeping of group i."""

    def __init__(self, hp: HParams, cp: CParams):
        attention = [il for il in range(hp.n_layer) if hp.has_kv(il)]
        window = [il for il in attention if hp.is_swa(il)]
        full = [il for il in attention if not hp.is_swa(il)]
        self.kv: list[KVCache] = []
        if full:
            self._add(full, hp, cp, KVStore(cp.n_ctx_seq, cp.n_seq_max, cp.n_stream))
        if window:
            store = KVStore(window_size(hp, cp), cp.n_seq_max, cp.n_stream, window=hp.n_swa, swa_type=hp.swa_type)
            self._add(window, hp, cp, store)
        super().__init__([g.store for g in self.kv], cp.n_seq_max, cp.n_ubatch)

    def _add(self, layers: list[int], hp: HParams, cp: CParams, store: KVStore) -> None:
        self.kv.append(KVCache(len(self.kv), store, layers, hp, cp.type_k, cp.type_v))

    def kv_of(self, il: int) -> int:
        """The number of the KV group of layer il."""
        return next(i for i, g in enumerate(self.kv) if il in g.k)

    def tensors(self) -> Iterable[Tensor]:
        return (t for g in self.kv for t in g.tensors())

    @property
    def nbytes(self) -> int:
        return sum(g.nbytes for g in self.kv)

    def alloc(self, backend: Backend) -> None:
        for g in self.kv:
            g.alloc(backend)

    def free(self, backend: Backend) -> None:
        for g in self.kv:
            backend.free(g.buffer)

    def sizes(self, step: Step) -> dict[str, int]:
        """Values of the groups' size variables, between `apply` and `commit` of the step."""
        values: dict[str, int] = {}
        for i, g in enumerate(self.kv):
            slots, store = step.slots[i], g.store
            values[f"n_kv{i}"] = store.n_kv(slots)
            values[f"n_cells{i}"] = store.n_listed(step.ubatch)
            values[f"stream{i}"] = int(slots.streams[0])
        return values


def window_size(hp: HParams, cp: CParams) -> int:
    """Cells of a window group: what its sequences see, and room for one ubatch."""
    if cp.swa_full:
        return cp.n_ctx_seq
    n = hp.n_swa * (cp.n_seq_max if cp.kv_unified else 1) + cp.n_ubatch
    return min(cp.n_ctx_seq, -(-n // N_PAD) * N_PAD)
