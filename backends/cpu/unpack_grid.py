"""Rows of the IQ1, IQ2 and IQ3 types to float32: groups of 8 or 4 are points of a grid, with signs or an offset.

Comes in: the address of a block, and that of the grid's bytes. Goes out: float32, the same bits as `ggraph.quants` gives.
Must not know: panels, ops. Block layouts are those of `ggraph.quants.iq`; numbers in the code are their byte offsets.
"""
from __future__ import annotations

import numpy as np

from .format_grid import even
from .kernel import inline, simd

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

_f32 = np.float32


@inline
def _signed(dst, point, n, scale, signs):
    """n <= 8 elements: scale times the point, negative where `signs` has its bit."""
    y = simd.to_f32(simd.load_i8_n(point, n)) * scale
    minus = (simd.iota() * 0 + signs >> simd.iota() & 1) == 1
    simd.store_f32_n(dst, simd.select(minus, -y, y), n)


@inline
def _nibble(address, i):
    """The i-th half of the bytes at an address."""
    return simd.get_u8(address + (i >> 1)) >> (i & 1) * 4 & 15


@inline
def _half_scale(d, s, unit):
    return d * (_f32(0.5) + _f32(s)) * _f32(unit)


@inline
def _iq2_xxs(src, dst, grid):
    d = simd.get_f16(src)
    for i in range(8):
        at = src + 2 + 8 * i
        signs = simd.get_i32(at + 4)
        scale = _half_scale(d, signs >> 28 & 15, 0.25)
        for n in range(4):
            point = grid + 8 * simd.get_u8(at + n)
            _signed(dst + 128 * i + 32 * n, point, 8, scale, even(signs >> 7 * n))


@inline
def _iq2_xs(src, dst, grid):
    d = simd.get_f16(src)
    for j in range(32):
        q = simd.get_u16(src + 2 + 2 * j)
        scale = _half_scale(d, _nibble(src + 66, j >> 1), 0.25)
        _signed(dst + 32 * j, grid + 8 * (q & 511), 8, scale, even(q >> 9))


@inline
def _iq2_s(src, dst, grid):
    d = simd.get_f16(src)
    for j in range(32):
        index = simd.get_u8(src + 2 + j) | (simd.get_u8(src + 66 + (j >> 2)) >> (j & 3) * 2 & 3) << 8
        scale = _half_scale(d, _nibble(src + 74, j >> 1), 0.25)
        _signed(dst + 32 * j, grid + 8 * index, 8, scale, simd.get_u8(src + 34 + j))


@inline
def _iq3_xxs(src, dst, grid):
    d = simd.get_f16(src)
    for j in range(64):
        signs = simd.get_i32(src + 66 + 4 * (j >> 3))
        scale = _half_scale(d, signs >> 28 & 15, 0.5)
        point = grid + 4 * simd.get_u8(src + 2 + j)
        _signed(dst + 16 * j, point, 4, scale, even(signs >> 7 * (j >> 1 & 3)) >> (j & 1) * 4)


@inline
def _iq3_s(src, dst, grid):
    d = simd.get_f16(src)
    for j in range(64):
        index = simd.get_u8(src + 2 + j) | (simd.get_u8(src + 66 + (j >> 3)) >> (j & 7) & 1) << 8
        scale = d * _f32(2 * _nibble(src + 106, j >> 3) + 1)
        _signed(dst + 16 * j, grid + 4 * index, 4, scale, simd.get_u8(src + 74 + (j >> 1)) >> (j & 1) * 4)


@inline
def _shifted(dst, point, scale, minus):
    """8 elements: scale times the point plus or minus 1/8."""
    y = simd.to_f32(simd.load_i8_n(point, 8)) + (_f32(-0.125) if minus else _f32(0.125))
    simd.store_f32_n(dst, y * scale, 8)


@inline
def _iq1_s(src, dst, grid):
    d = simd.get_f16(src)
    for j in range(32):
        qh = simd.get_u16(src + 34 + 2 * (j >> 2))
        index = simd.get_u8(src + 2 + j) | (qh >> (j & 3) * 3 & 7) << 8
        _shifted(dst + 32 * j, grid + 8 * index, d * _f32((qh >> 12 & 7) * 2 + 1), qh >> 15)


@inline
def _iq1_m(src, dst, grid):
    """The top nibbles of the four words of scales make the half-precision d."""
    bits = 0
    for j in range(4):
        bits |= simd.get_u16(src + 48 + 2 * j) >> 12 << 4 * j
    simd.put_u16(dst, bits)
    d = simd.get_f16(dst)
    for j in range(32):
        qh = _nibble(src + 32, j)
        scale = simd.get_u16(src + 48 + 2 * (j >> 3)) >> (j >> 1 & 3) * 3 & 7
        _shifted(dst + 32 * j, grid + 8 * (simd.get_u8(src + j) | (qh & 7) << 8), d * _f32(scale * 2 + 1), qh >> 3)


BLOCKS = {"IQ2_XXS": _iq2_xxs, "IQ2_XS": _iq2_xs, "IQ2_S": _iq2_s, "IQ3_XXS": _iq3_xxs, "IQ3_S": _iq3_s,
          "IQ1_S": _iq1_s, "IQ1_M": _iq1_m}            # block(src, dst, address of the grid)
