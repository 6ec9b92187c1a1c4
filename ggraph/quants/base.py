"""What every tensor type shares: the class that registers it, and how bit fields are cut out of bytes.

In: blocks as structured arrays [n] with the type's `layout`. Out: float32 [n, block]. It knows no file and no tensor.
Products and sums are written in the order in which ggml-quants.c evaluates them in float32, so results equal its own.
"""
from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from ggraph.dtypes import DType

Array = Any     # a NumPy array, whose element type NumPy's stubs cannot follow through structured fields
Blocks = Any    # structured array [n] of Quant.layout

QUANTS: dict[DType, type[Quant]] = {}


class Quant:
    """One tensor type. A subclass has the layout of its block, `unpack`, and `pack` where something packs into it."""
    dtype: ClassVar[DType]
    layout: ClassVar[np.dtype[Any]]

    def __init_subclass__(cls, dtype: DType, layout: list[Any]):
        cls.dtype, cls.layout = dtype, np.dtype(layout)
        assert cls.layout.itemsize == dtype.nbytes and dtype not in QUANTS, dtype
        QUANTS[dtype] = cls

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        """Values [n, ...] of the blocks, `block` of them each, in any shape."""
        raise NotImplementedError

    @classmethod
    def pack(cls, x: Array) -> Blocks:
        """Blocks of x, float32 [n, block], equal to what ggml's quantize_row_*_ref makes of it if no value is NaN.

        What that makes of a NaN depends on where it stands; here the block's scale becomes NaN, so it stays visible.
        """
        raise NotImplementedError


def column(x: Array) -> Array:
    """float32, with an axis more to multiply the elements of a block or group: [...] -> [..., 1]."""
    return x.astype(np.float32)[..., None]


def split(qs: Array, bits: int) -> Array:
    """Bytes [..., k] -> their bit fields [..., 8 // bits, k]: the lowest field of all bytes first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return (qs[..., None, :] >> shifts[:, None]) & np.uint8((1 << bits) - 1)


def extreme(x: Array) -> Array:
    """[n, block] -> [n, 1]: the first element of largest magnitude, with its sign; +0.0 for a block of zeros."""
    first = np.abs(x).argmax(axis=-1, keepdims=True)
    return np.take_along_axis(x, first, -1) + np.float32(0)


def bits(x: Array) -> Array:
    """The bits of each byte in turn, lowest first: [..., k] -> [..., 8 * k]."""
    return np.unpackbits(x, axis=-1, bitorder="little")
