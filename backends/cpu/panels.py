"""Packed copies of weights: which are wanted, where they are, made once per model.

In: the weights of a model, then requests for their panels. Out: addresses. A weight that no mat-mul reads is never packed,
and what was packed gives its mapped pages back to the system: they can be read again, but no longer count as resident.
"""
from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from ggraph import env
from ggraph.backend import HostBuffer, Progress
from ggraph.tensor import Tensor

from . import pool, repack

CHUNK = 8 << 20                 # bytes packed in one native call: progress and Ctrl-C between two


class Panels:
    """`mode`: "on", "off", or "auto": on, unless the panels of all weights exceed the free memory."""

    def __init__(self, mode: str = "auto"):
        self.mode = mode
        self.offered: set[Tensor] = set()
        self.buffers: dict[Tensor, HostBuffer] = {}
        self.empty: list[Tensor] = []
        self.turn = pool.Lock()                 # Contexts of one model may be opened by several threads

    def offer(self, weights: Sequence[Tensor]) -> None:
        """Weights that may be packed."""
        self.offered.update(weights)
        matrices = [w for w in weights if w.ne[1] > 1 and repack.supports(w.type, w.ne[0])]
        needed, free = sum(map(panel_bytes, matrices)), env.free_memory()
        if self.mode == "auto" and needed > free:
            self.mode = "off"
            env.log(f"weights are not repacked: that takes {needed / 2**20:.0f} MiB, {free / 2**20:.0f} MiB are free; "
                    "products are slower so")

    def address(self, weight: Tensor) -> int | None:
        """Where the panels of a weight are once `fill` has run; None if it is not to be packed."""
        if self.mode == "off" or weight not in self.offered or not repack.supports(weight.type, weight.ne[0]):
            return None
        with self.turn:
            if weight not in self.buffers:
                self.buffers[weight] = HostBuffer.zeros(panel_bytes(weight))
                self.empty.append(weight)
            return self.buffers[weight].address

    def fill(self, progress: Progress | None) -> None:
        """Pack what was asked for since the last call, or wait until another thread has."""
        with self.turn:
            total = sum(t.nbytes for t in self.empty)
            done = 0
            while self.empty:
                weight = self.empty[0]
                for start, n in self._pack(weight, self.buffers[weight].address):
                    release(start, n)
                    done += n
                    if progress:
                        progress("weights", done, total)
                self.empty.pop(0)

    @staticmethod
    def _pack(weight: Tensor, to: int) -> Iterator[tuple[int, int]]:
        """Pack every matrix of a weight; yields address and number of the bytes that have been read."""
        kernel = repack.repack_kernel(weight.type)
        address, (k, n_rows, n_mat, n_mat2), stride = weight.buffer.address + weight.offset, weight.ne, weight.nb[1]
        step = max(repack.ROWS, CHUNK // stride // repack.ROWS * repack.ROWS)
        for _ in range(n_mat * n_mat2):
            for row in range(0, n_rows, step):
                n = min(step, n_rows - row)
                block = np.array([address + row * stride, stride, to, n, k], np.int64)
                table = np.array([[kernel.address, block.ctypes.data, 0]], np.int64)
                pool.run(table.ctypes.data, 1, os.cpu_count() or 1)
                to += repack.panel_bytes(weight.type, n, k)
                yield address + row * stride, n * stride
            address += weight.nb[2]

    def close(self) -> None:
        self.buffers.clear()
        self.offered.clear()
        self.empty.clear()


def panel_bytes(weight: Tensor) -> int:
    k, n_rows, n_mat, n_mat2 = weight.ne
    return repack.panel_bytes(weight.type, n_rows, k) * n_mat * n_mat2


def release(address: int, nbytes: int) -> None:
    """Give the whole pages of a mapped file back; on systems without this advice they stay."""
    if sys.platform != "linux":
        return
    page = mmap.PAGESIZE
    start = -(-address // page) * page
    length = (address + nbytes) // page * page - start
    if length > 0:
        ctypes.CDLL(None, use_errno=True).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED)
