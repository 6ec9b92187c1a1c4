"""K and V of one layer group over the cells of a store: the tensors, and how a graph writes and reads them.

In: a `KVStore`, head counts and types. Out: leaf tensors `cache_k_l3` [n_embd_k_gqa, size, n_stream], and nodes on them.
Where V is a part of K (latent attention) there is no tensor for it.
Cell indices and the extent read are graph inputs and sizes, never numbers in the graph.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import ops
from ..backend import Backend
from ..batch import Ubatch
from ..dtypes import DType
from ..errors import Error
from ..hparams import HParams
from ..size import Size
from ..tensor import F32, Tensor, leaf
from . import Step
from .kv import KVStore, Slots
from .recurrent import RecurrentStore


class Group(ABC):
    """The tensors of a store's layers, in one buffer: rows [n, ...] that a graph reads and writes by number."""
    index: int
    store: Any
    buffers: Sequence[tuple[Backend, Any]] = ()

    @abstractmethod
    def layers(self) -> list[tuple[int, Tensor]]:
        """(layer, one of its tensors), all of them."""

    def tensors(self) -> list[Tensor]:
        return [t for _, t in self.layers()]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors())

    def place(self, home: Callable[[int], Backend]) -> dict[Backend, int]:
        """`home`: the backend of a layer. Bytes of the one buffer that each needs, in which all tensors have their place."""
        self.home = {t: home(il) for il, t in self.layers()}
        nbytes: dict[Backend, int] = {}
        for t, backend in self.home.items():
            t.offset = nbytes.get(backend, 0)
            nbytes[backend] = t.offset + -(-t.nbytes // 64) * 64
        return nbytes

    def alloc(self, home: Callable[[int], Backend]) -> None:
        for backend, nbytes in self.place(home).items():
            buffer = backend.alloc(nbytes)
            self.buffers = [*self.buffers, (backend, buffer)]
            for t in (t for t, b in self.home.items() if b is backend):
                t.buffer = buffer

    def free(self) -> None:
        for backend, buffer in self.buffers:
            backend.free(buffer)
        self.buffers = ()

    def sizes(self, step: Step) -> dict[str, int]:
        """Values of the group's size variables, between `apply` and `commit` of the step."""
        return {}

    # --- rows for save and load

    def read_rows(self, tensor: Tensor, rows: np.ndarray) -> np.ndarray:
        """uint8 [n, row bytes]"""
        data = self.home[tensor].download(tensor.buffer, tensor.offset, tensor.nbytes)
        found: np.ndarray = data.reshape(-1, tensor.nb[1])[rows]
        return found

    def write_rows(self, tensor: Tensor, rows: np.ndarray, data: np.ndarray) -> None:
        for run in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(rows) != 1) + 1):
            if len(run):
                self.home[tensor].upload(tensor.buffer, tensor.offset + int(rows[run[0]]) * tensor.nb[1], data[run])


class KVCache(Group):
    """Group number `index`; size variables `n_kv{index}` (cells that a graph reads) and `n_cells{index}`."""

    def __init__(self, index: int, store: KVStore, layers: Sequence[int], hp: HParams, type_k: DType, type_v: DType,
                 indexed: Sequence[int] = ()):
        """`indexed`: the layers that choose blocks to attend to."""
        self.index, self.store, self.hp = index, store, hp
        size, n_stream = store.size, store.n_stream
        head_i = hp.indexer.head if hp.indexer else 0
        self.k = {il: leaf(type_k, (hp.n_embd_k_gqa(il), size, n_stream), f"cache_k_l{il}") for il in layers}
        self.v = {il: leaf(type_v, (n, size, n_stream), f"cache_v_l{il}") for il in layers if (n := hp.n_embd_v_gqa(il))}
        self.i = {il: leaf(type_k, (head_i, size, n_stream), f"cache_idx_k_l{il}") for il in indexed}
        head_k, head_v = hp.head_k(layers[0]), hp.head_v(layers[0])         # a group's layers have or lack a window alike
        for of, head in ((self.k, head_k), (self.v, head_v), (self.i, head_i)):
            for t in of.values():
                if head % t.type.block:
                    raise Error(f"a cache of type {t.type} needs heads of a multiple of {t.type.block}; this model's have {head}")
        self.n_kv = Size.variable(f"n_kv{index}", size)
        self.n_cells = Size.variable(f"n_cells{index}", size * store.n_seq_max)
        self.n_blocks = Size.variable(f"n_blocks{index}", -(-size // hp.indexer.block)) if hp.indexer and self.i else 0
        self.stream0 = Size.variable(f"stream{index}", n_stream - 1) if n_stream > 1 else 0
        # Sizes of the Hadamard blocks that K and V are multiplied with before they are quantized (and Q with K's); 0: none.
        # As llama.cpp: quantized types, heads of a multiple of 64; K takes the largest block that divides the head, V 64.
        # Latent vectors stay as they are.
        self.rot_k = head_k & -head_k if self.v and _spread(self.k, head_k) else 0
        self.rot_v = 64 if _spread(self.v, head_v) else 0

    def layers(self) -> list[tuple[int, Tensor]]:
        return [*self.k.items(), *self.v.items(), *self.i.items()]

    def sizes(self, step: Step) -> dict[str, int]:
        slots, i = step.slots[self.index], self.index
        return {f"n_kv{i}": self.store.n_kv(slots), f"n_cells{i}": self.store.n_listed(step.ubatch),
                f"stream{i}": int(slots.streams[0]), f"n_blocks{i}": self.count_blocks(step.ubatch)}

    def count_blocks(self, ubatch: Ubatch) -> int:
        """Blocks that hold the positions of the ubatch's sequences, and at least as many as are chosen; 0 where none are."""
        if self.hp.indexer is None or not self.i:
            return 0
        n: int = max(self.store.line(s).last for s in set(ubatch.seq.tolist())) // self.hp.indexer.block + 1
        if n > self.n_blocks:
            raise Error(f"a sequence reaches past position {self.n_blocks * self.hp.indexer.block - 1}, the last that this context "
                        "can choose blocks of; give a larger n_ctx")
        return max(n, self.hp.indexer.n_blocks)

    def block_of_cells(self, slots: Slots, n: int) -> np.ndarray:
        """int32 [n_stream_used, n_kv]: the block of each cell, one of the n; any of a cell that is free or of another sequence."""
        assert self.hp.indexer is not None
        pos = np.stack([self.store.cells[s].pos[:self.store.n_kv(slots)] for s in slots.streams.tolist()])
        blocks: np.ndarray = np.clip(pos // self.hp.indexer.block, 0, n - 1).astype(np.int32)
        return blocks

    # --- in a graph

    def cpy_k(self, k: Tensor, idx: Tensor, il: int) -> Tensor:
        """Write k [head, n_head_kv, n_tokens] to the cells idx I32 [n_tokens]."""
        return _write(self.k[il], k, idx)

    def cpy_v(self, v: Tensor, idx: Tensor, il: int) -> Tensor:
        return _write(self.v[il], v, idx)

    def get_k(self, il: int, n_stream: int) -> Tensor:
        """The cells in use: a view [head_k, n_head_kv, n_kv, n_stream]."""
        return self._read(self.k[il], self.hp.n_head_kv[il], n_stream)

    def get_v(self, il: int, n_stream: int) -> Tensor:
        """The same of V [head_v, ...], which may be the first elements of K."""
        if il in self.v:
            return self._read(self.v[il], self.hp.n_head_kv[il], n_stream)
        k = self.get_k(il, n_stream)
        return ops.view(k, (self.hp.n_embd_head_v, *k.ne[1:]), k.nb[1:])

    def cpy_i(self, k: Tensor, idx: Tensor, il: int) -> Tensor:
        return _write(self.i[il], k, idx)

    def get_i(self, il: int, n_stream: int) -> Tensor:
        """The keys that blocks are chosen by: a view [indexer.head, 1, n_kv, n_stream]."""
        return self._read(self.i[il], 1, n_stream)

    def all_i(self, il: int) -> Tensor:
        """The same of all cells and streams, in rows as `CellIds` numbers them."""
        n, size, n_stream, _ = self.i[il].ne
        return ops.reshape(self.i[il], (n, size * n_stream))

    def _read(self, cache: Tensor, n_head: int, n_stream: int) -> Tensor:
        head = cache.ne[0] // n_head
        x = ops.view(cache, (head, n_head, self.n_kv, n_stream), (cache.type.row_bytes(head), cache.nb[1], cache.nb[2]),
                     self.stream0 * cache.nb[2])
        x.name = cache.name + " (view)"
        return x

    def copy_stream(self, src: int, dst: int) -> None:
        for t, backend in self.home.items():
            data = backend.download(t.buffer, t.offset + src * t.nb[2], t.nb[2])
            backend.upload(t.buffer, t.offset + dst * t.nb[2], data)


def _spread(layers: dict[int, Tensor], head: int) -> bool:
    return any(t.type.quantized for t in layers.values()) and head % 64 == 0


def _write(cache: Tensor, x: Tensor, idx: Tensor) -> Tensor:
    n, size, n_stream, _ = cache.ne
    flat = ops.reshape(cache, (n, size * n_stream))
    rows = ops.view(x, (n, x.ne[2]), (x.nb[2],)) if x.nb[1] == x.ne[0] * x.nb[0] else ops.cont(x, (n, x.ne[2]))
    return ops.set_rows(flat, rows, idx)


class StateCache(Group):
    """The state rows of recurrent layers: `cache_r_l3` F32 [n_embd_r, n_rows] (inputs of the convolution), `cache_s_l3`
    F32 [n_embd_s, n_rows] (the recurrence), and in a layer that reads n-grams `cache_ple_r_l3` F32 [n_embd_p, n_rows]."""
    store: RecurrentStore

    def __init__(self, index: int, store: RecurrentStore, layers: Sequence[int], hp: HParams):
        self.index, self.store = index, store
        self.r = {il: leaf(F32, (hp.n_embd_r, store.n_rows), f"cache_r_l{il}") for il in layers if hp.n_embd_r}
        self.s = {il: leaf(F32, (hp.n_embd_s, store.n_rows), f"cache_s_l{il}") for il in layers if hp.n_embd_s}
        self.p = {il: leaf(F32, (hp.n_embd_p, store.n_rows), f"cache_ple_r_l{il}") for il in layers if il == hp.ngram_layer}

    def layers(self) -> list[tuple[int, Tensor]]:
        return [*self.r.items(), *self.s.items(), *self.p.items()]
