"""Panel formats of the types with point grids: IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S.

A point is looked up once, when the panel is made; a code is the position of a value among the few that its grid has,
with its sign (IQ1: that of the delta) as the bit above. In products the table turns codes into values.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ggraph import dtypes
from ggraph.quants.grids import grid

from .formats import Format, spread_bits
from .kernel import inline, simd

# mypy: disable-error-code="no-untyped-def, no-untyped-call"


def _points(name: str) -> bytes:
    """The grid with each value replaced by its position among the values."""
    points = np.asarray(grid(name))
    return bytes(np.searchsorted(np.unique(points), points).astype(np.uint8).tobytes())


def _signed(values: tuple[int, ...], bias: int) -> tuple[int, ...]:
    """Table for codes value | sign << n."""
    room = 1 << (len(values) - 1).bit_length()
    padded = values + (0,) * (room - len(values))
    return tuple(bias + v for v in padded) + tuple(bias - v for v in values)


@inline
def even(x):
    """Signs by 7-bit index: bit 7 makes the number of minuses even."""
    x &= 127
    y = x ^ x >> 4
    y ^= y >> 2
    return x | (y ^ y >> 1) << 7 & 128


@inline
def of_half(x, g):
    """The 4 signs of group g out of 8."""
    return spread_bits(x >> 4 * (g & 1))


# Codes. Groups of 4 k: g >> 1 counts the points of 8 k in a block of 32.

@inline
def code_iq2_xxs(src, i, g, points):
    at, n = src + 2 + 8 * i, g >> 1
    point = simd.get_i32(points + 8 * simd.get_u8(at + n) + 4 * (g & 1))
    return point | of_half(even(simd.get_i32(at + 4) >> 7 * n), g) << 2


@inline
def code_iq2_xs(src, i, g, points):
    x = simd.get_u16(src + 2 + 8 * i + 2 * (g >> 1))
    return simd.get_i32(points + 8 * (x & 511) + 4 * (g & 1)) | of_half(even(x >> 9), g) << 2


@inline
def code_iq2_s(src, i, g, points):
    at, n = src + 2 + 4 * i + (g >> 1), g >> 1
    index = simd.get_u8(at) | (simd.get_u8(src + 66 + i) >> 2 * n & 3) << 8
    return simd.get_i32(points + 8 * index + 4 * (g & 1)) | of_half(simd.get_u8(at + 32), g) << 2


@inline
def code_iq3_xxs(src, i, g, points):
    point = simd.get_i32(points + 4 * simd.get_u8(src + 2 + 8 * i + g))
    return point | of_half(even(simd.get_i32(src + 66 + 4 * i) >> 7 * (g >> 1)), g) << 3


@inline
def code_iq3_s(src, i, g, points):
    index = simd.get_u8(src + 2 + 8 * i + g) | (simd.get_u8(src + 66 + i) >> g & 1) << 8
    return simd.get_i32(points + 4 * index) | of_half(simd.get_u8(src + 74 + 4 * i + (g >> 1)), g) << 3


@inline
def code_iq1_s(src, i, g, points):
    n, qh = g >> 1, simd.get_u16(src + 34 + 2 * i)
    index = simd.get_u8(src + 2 + 4 * i + n) | (qh >> 3 * n & 7) << 8
    return simd.get_i32(points + 8 * index + 4 * (g & 1)) | (qh >> 15) * 0x04040404


@inline
def code_iq1_m(src, i, g, points):
    n = 4 * i + (g >> 1)
    qh = simd.get_u8(src + 32 + (n >> 1)) >> 4 * (n & 1) & 15
    index = simd.get_u8(src + n) | (qh & 7) << 8
    return simd.get_i32(points + 8 * index + 4 * (g & 1)) | (qh >> 3) * 0x04040404


# Heads: f16 d | a scale of up to 4 bits per 32 as i32 [16 rows], scale i at bit 4i; or two per block as u8 [8][16 rows].

@inline
def put_nibble(dst, r, i, x):
    at = dst + 32 + 4 * r
    simd.put_i32(at, (0 if i == 0 else simd.get_i32(at)) | (x & 15) << 4 * i)


@inline
def nibble(head, i):
    return simd.to_f32(simd.load_i32(head + 32) >> 4 * i & 15)


@inline
def nibbles(head, i):
    x = simd.load_u8(head + 32 + 16 * i)
    return simd.to_f32(x & 15), simd.to_f32(x >> 4)


@inline
def head_iq2_xxs(src, dst, r):
    simd.put_u16(dst + 2 * r, simd.get_u16(src))
    for i in range(8):
        put_nibble(dst, r, i, simd.get_i32(src + 6 + 8 * i) >> 28)


@inline
def head_iq3_xxs(src, dst, r):
    simd.put_u16(dst + 2 * r, simd.get_u16(src))
    for i in range(8):
        put_nibble(dst, r, i, simd.get_i32(src + 66 + 4 * i) >> 28)


@inline
def head_iq3_s(src, dst, r):
    simd.put_u16(dst + 2 * r, simd.get_u16(src))
    simd.put_i32(dst + 32 + 4 * r, simd.get_i32(src + 106))


@inline
def head_iq2_s(src, dst, r):
    simd.put_u16(dst + 2 * r, simd.get_u16(src))
    for i in range(8):
        simd.put_u8(dst + 32 + 16 * i + r, simd.get_u8(src + 74 + i))


@inline
def head_iq2_xs(src, dst, r):
    simd.put_u16(dst + 2 * r, simd.get_u16(src))
    for i in range(8):
        simd.put_u8(dst + 32 + 16 * i + r, simd.get_u8(src + 66 + i))


@inline
def head_iq1_s(src, dst, r):
    simd.put_u16(dst + 2 * r, simd.get_u16(src))
    for i in range(8):
        put_nibble(dst, r, i, simd.get_u16(src + 34 + 2 * i) >> 12 & 7)


@inline
def head_iq1_m(src, dst, r):
    d = 0
    for j in range(4):
        d |= simd.get_u16(src + 48 + 2 * j) >> 12 << 4 * j
    simd.put_u16(dst + 2 * r, d)
    for i in range(8):
        x = simd.get_u16(src + 48 + 2 * (i >> 1)) >> 6 * (i & 1)
        simd.put_u8(dst + 32 + 16 * i + r, x & 7 | (x >> 3 & 7) << 4)


@inline
def scale_iq2_xxs(head, i):
    return (simd.load_f16(head) * (0.5 + nibble(head, i)) * 0.25,)


@inline
def scale_iq2_s(head, i):
    d, (x, y) = simd.load_f16(head), nibbles(head, i)
    return d * (0.5 + x) * 0.25, d * (0.5 + y) * 0.25


@inline
def scale_iq3_xxs(head, i):
    return (simd.load_f16(head) * (0.5 + nibble(head, i)) * 0.5,)


@inline
def scale_iq3_s(head, i):
    return (simd.load_f16(head) * (1.0 + 2.0 * nibble(head, i)),)


@inline
def scale_iq1_s(head, i):
    return (simd.load_f16(head) * (1.0 + 2.0 * nibble(head, i)) * 0.125,)


@inline
def scale_iq1_m(head, i):
    d, (x, y) = simd.load_f16(head), nibbles(head, i)
    return d * (1.0 + 2.0 * x) * 0.125, d * (1.0 + 2.0 * y) * 0.125


# Biases are powers of two: then products of them are shifts.
_IQ1 = tuple(16 + v for v in (-7, 1, 9, 0, -9, -1, 7))                         # 8 v + 1, 8 v - 1
_IQ2 = _signed((8, 25, 43), 64)
_IQ3_XXS, _IQ3_S = _signed((4, 12, 20, 28, 36, 44, 52, 62), 64), _signed((1, 3, 5, 7, 9, 11, 13, 15), 16)


def _enter(name: str, bits: int, head_bytes: int, code: Callable[..., int], head: Callable[..., None],
           scales: Callable[..., object], bias: int, table: tuple[int, ...], points: str = "") -> None:
    wide = 32 if head_bytes == 96 else 16
    Format(dtypes.TYPES[name], bits, head_bytes, code, head, scales, wide, bias, table=table,
           grid=partial(_points, points or name))


_enter("IQ1_S", 3, 96, code_iq1_s, head_iq1_s, scale_iq1_s, 16, _IQ1)
_enter("IQ1_M", 3, 160, code_iq1_m, head_iq1_m, scale_iq1_m, 16, _IQ1, "IQ1_S")
_enter("IQ2_XXS", 3, 96, code_iq2_xxs, head_iq2_xxs, scale_iq2_xxs, 64, _IQ2)
_enter("IQ2_XS", 3, 160, code_iq2_xs, head_iq2_xs, scale_iq2_s, 64, _IQ2)
_enter("IQ2_S", 3, 160, code_iq2_s, head_iq2_s, scale_iq2_s, 64, _IQ2)
_enter("IQ3_XXS", 4, 96, code_iq3_xxs, head_iq3_xxs, scale_iq3_xxs, 64, _IQ3_XXS)
_enter("IQ3_S", 4, 96, code_iq3_s, head_iq3_s, scale_iq3_s, 16, _IQ3_S)
