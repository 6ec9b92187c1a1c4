"""Operands: a tensor of a plan, with the sizes of the batch at hand, as NumPy sees it.

In: a tensor, its evaluated shape, strides and byte offset. Out: arrays in NumPy order (the reverse of `ne`), as views
of the tensor's own bytes where its type allows. Must not know: ops, plans.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ggraph import quants
from ggraph.errors import BackendError
from ggraph.tensor import Tensor

Array = Any         # a NumPy array; its stubs cannot follow element types through mixed arithmetic
Kept = dict[Tensor, Array | None]       # weights that stay unpacked as float32; None until the first use


class Operand:
    """`ne` and `nb` are plain integers here; `offset` counts from the start of the buffer's bytes `data`."""
    __slots__ = ("data", "kept", "nb", "ne", "offset", "params", "tensor", "type")

    def __init__(self, tensor: Tensor, ne: Sequence[int], nb: Sequence[int], offset: int, kept: Kept):
        self.tensor, self.type, self.params = tensor, tensor.type, tensor.params
        self.ne, self.nb, self.offset, self.kept = ne, nb, offset, kept
        self.data: Array = tensor.root.buffer.data

    @property
    def shape(self) -> tuple[int, int, int, int]:
        a, b, c, d = self.ne
        return d, c, b, a

    def view(self) -> Array:
        """The elements in place, for types that NumPy has."""
        if self.type.np is None:
            raise BackendError(f"{self.tensor}: NumPy has no type {self.type}")
        return np.ndarray(self.shape, self.type.np, self.data, self.offset, self.nb[::-1])

    def blocks(self) -> Array:
        """The bytes in place: uint8 [ne3, ne2, ne1, blocks of a row, bytes of a block]."""
        *outer, n = self.shape
        if n % self.type.block:
            raise BackendError(f"{self.tensor}: a row of {n} does not fill blocks of {self.type.block}")
        shape = (*outer, n // self.type.block, self.type.nbytes)
        return np.ndarray(shape, np.uint8, self.data, self.offset, (*self.nb[::-1], 1))

    def read(self) -> Array:
        """Elements as float32; integers and F64 keep their type. A view wherever nothing is converted."""
        if self.type.plain and self.type.np is not np.float16:
            return self.view()
        unpacked = self.kept.get(self.tensor)
        if unpacked is None:
            unpacked = unpack(self, self.blocks())
            if self.tensor in self.kept:
                self.kept[self.tensor] = unpacked
        return unpacked

    def read_rows(self, rows: Array) -> Array:
        """Elements [ne3, ne2, len(rows), ne0] of the given rows alone; `rows` is one-dimensional."""
        if self.type.plain and self.type.np is not np.float16:
            return self.view()[:, :, rows]
        return unpack(self, self.blocks()[:, :, rows])

    def read_matrix(self, i: int) -> Array:
        """Elements [ne1, ne0] of matrix i of axis 2 alone."""
        if self.type.plain and self.type.np is not np.float16:
            return self.view()[0, i]
        return unpack(self, self.blocks()[0, i])

    def write(self, x: Array) -> None:
        """Store x, of exactly this shape, in this type."""
        if x.shape != self.shape:
            raise BackendError(f"{self.tensor}: the kernel returned shape {x.shape[::-1]}, not {self.ne}")
        if self.type.plain:
            self.view()[...] = x
        else:
            self.blocks()[...] = pack(self, x)


def unpack(operand: Operand, blocks: Array) -> Array:
    """Blocks [.., n, bytes] of the operand's type -> float32 [.., elements]."""
    return quants.unpack(np.ascontiguousarray(blocks).reshape(*blocks.shape[:-2], -1), operand.type)


def pack(operand: Operand, x: Array) -> Array:
    """Elements [.., n] -> blocks [.., n / block, bytes] of the operand's type."""
    rows = quants.pack(np.ascontiguousarray(x, np.float32), operand.type)
    return rows.reshape(*x.shape[:-1], -1, operand.type.nbytes)


def tile(x: Array, shape: Sequence[int]) -> Array:
    """x repeated along each axis until it has `shape`; axes of 1 are left to NumPy's broadcasting."""
    if all(n in (1, m) for n, m in zip(x.shape, shape)):
        return x
    return np.tile(x, [m // n for n, m in zip(x.shape, shape)])


def row_numbers(rows: Array, n: int, what: Tensor) -> Array:
    """`rows` after checking that all are row numbers of a tensor of n rows."""
    if rows.size and (int(rows.min()) < 0 or int(rows.max()) >= n):
        raise BackendError(f"{what}: row numbers {rows.min()} to {rows.max()} are not all within 0 to {n - 1}")
    return rows
