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

SHARE = np.float32(0.5)      # found by trying: less of it fits large values better and all others worse than llama.cpp does
QUANTS: dict[DType, type[Quant]] = {}


class Quant:
    """One tensor type. A subclass has the layout of its block, `unpack`, `pack` if there is one plain way to round to it, and
    `quantize` where searching finds better scales.

    `spread`: how much of the mean square joins a value's own square in its weight; None: importance changes nothing.
    """
    dtype: ClassVar[DType]
    layout: ClassVar[np.dtype[Any]]
    spread: ClassVar[float | None] = None

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

    @classmethod
    def quantize(cls, x: Array, w: Array | None = None) -> Blocks:
        """Blocks of x, float32 [n, block], that lose little; finite values only. `w`: weights of their squared errors, like x;
        None: the type's own."""
        return cls.pack(x)

    @classmethod
    def weigh(cls, importance: Array, x: Array, mean_square: Array) -> Array:
        """Weights for `quantize`: large values count more than their importance alone."""
        return importance * np.sqrt(np.float32(cls.spread or 0) * mean_square + x * x)


def column(x: Array) -> Array:
    """float32, with an axis more to multiply the elements of a block or group: [...] -> [..., 1]."""
    return x.astype(np.float32)[..., None]


def split(qs: Array, bits: int) -> Array:
    """Bytes [..., k] -> their bit fields [..., 8 // bits, k]: the lowest field of all bytes first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return (qs[..., None, :] >> shifts[:, None]) & np.uint8((1 << bits) - 1)


def join(fields: Array, bits: int) -> Array:
    """What `split` takes apart: bit fields [..., 8 // bits, k] -> bytes [..., k]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    out: Array = np.bitwise_or.reduce(fields.astype(np.uint8) << shifts[:, None], axis=-2)
    return out


def extreme(x: Array) -> Array:
    """[n, block] -> [n, 1]: the first element of largest magnitude, with its sign; +0.0 for a block of zeros."""
    first = np.abs(x).argmax(axis=-1, keepdims=True)
    return np.take_along_axis(x, first, -1) + np.float32(0)


def code(x: Array, d: Array, low: int, high: int) -> Array:
    """The whole numbers low .. high nearest to x / d, int32; 0 (or what is nearest to it) where d is 0."""
    inverse = np.where(d == 0, np.float32(0), np.float32(1) / d)
    return np.clip(np.rint(x * inverse), low, high).astype(np.int32)


def own_weights(x: Array) -> Array:
    """Weights where nothing is known of importance: the square, and a part of the block's mean square, [n, ...]."""
    mean = np.mean(x * x, axis=tuple(range(1, x.ndim)), keepdims=True)
    return x * x + SHARE * mean


def refit(y: Array, x: Array, w: Array) -> Array:
    """[n]: the scale that makes y * scale fit x best, both [n, block]; 0 where y is zero."""
    yy = np.einsum("ij,ij,ij->i", w, y, y)
    return np.where(yy > 0, np.einsum("ij,ij,ij->i", w, x, y) / yy, np.float32(0)).astype(np.float32)


def bits(x: Array) -> Array:
    """The bits of each byte in turn, lowest first: [..., k] -> [..., 8 * k]."""
    return np.unpackbits(x, axis=-1, bitorder="little")
