"""Rows of quantized blocks to float32, in the registers of a kernel.

Comes in: the address of a row as files hold it. Goes out: float32, the same bits as `ggraph.quants` gives.
Must not know: panels, ops. Block layouts are those of `ggraph.quants`; numbers in the code are their byte offsets.
"""
from __future__ import annotations

import numpy as np

from ggraph.dtypes import DType
from ggraph.quants.fp4 import E2M1_DOUBLED
from ggraph.quants.grids import grid
from ggraph.quants.legacy import IQ4_VALUES

from . import unpack_grid
from .kernel import inline, simd

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

_f32 = np.float32


@inline
def _bits(address):
    """The 16 bits at an address, one per lane."""
    return (simd.iota() * 0 + simd.get_u16(address) >> simd.iota()) & 1


@inline
def _q4_0(src, dst):
    d, q = simd.get_f16(src), simd.load_u8(src + 2)
    simd.store_f32(dst, simd.to_f32((q & 15) - 8) * d)
    simd.store_f32(dst + 64, simd.to_f32((q >> 4) - 8) * d)


@inline
def _q4_1(src, dst):
    d, m, q = simd.get_f16(src), simd.get_f16(src + 2), simd.load_u8(src + 4)
    simd.store_f32(dst, simd.to_f32(q & 15) * d + m)
    simd.store_f32(dst + 64, simd.to_f32(q >> 4) * d + m)


@inline
def _q5_0(src, dst):
    d, q = simd.get_f16(src), simd.load_u8(src + 6)
    simd.store_f32(dst, simd.to_f32((q & 15 | _bits(src + 2) << 4) - 16) * d)
    simd.store_f32(dst + 64, simd.to_f32((q >> 4 | _bits(src + 4) << 4) - 16) * d)


@inline
def _q5_1(src, dst):
    d, m, q = simd.get_f16(src), simd.get_f16(src + 2), simd.load_u8(src + 8)
    simd.store_f32(dst, simd.to_f32(q & 15 | _bits(src + 4) << 4) * d + m)
    simd.store_f32(dst + 64, simd.to_f32(q >> 4 | _bits(src + 6) << 4) * d + m)


@inline
def _q8_0(src, dst):
    d = simd.get_f16(src)
    simd.store_f32(dst, simd.to_f32(simd.load_i8(src + 2)) * d)
    simd.store_f32(dst + 64, simd.to_f32(simd.load_i8(src + 18)) * d)


# K-quants: 16 groups of 16, or 8 of 32. `_pair` gives the two bits that 64 bytes hold of group g.

@inline
def _pair(src, g):
    return simd.load_u8(src + (g >> 3) * 32 + (g & 1) * 16) >> (g >> 1 & 3) * 2 & 3


@inline
def _q2_k(src, dst):
    d, dmin = simd.get_f16(src + 80), simd.get_f16(src + 82)
    for g in range(16):
        s = simd.get_u8(src + g)
        q = simd.to_f32(_pair(src + 16, g))
        simd.store_f32(dst + 64 * g, q * (d * _f32(s & 15)) - dmin * _f32(s >> 4 & 15))


@inline
def _q3_k(src, dst):
    d = simd.get_f16(src + 108)
    for g in range(16):
        s = simd.get_u8(src + 96 + (g & 7)) >> (g >> 3) * 4 & 15
        s = s | (simd.get_u8(src + 104 + (g & 3)) >> (g >> 2) * 2 & 3) << 4
        high = simd.load_u8(src + (g & 1) * 16) >> (g >> 1) & 1
        q = simd.to_f32((_pair(src + 32, g) | high << 2) - 4)
        simd.store_f32(dst + 64 * g, q * (d * _f32(s - 32)))


@inline
def _scale_min(src, i):
    """Scale and min of group i from the 12 bytes of Q4_K and Q5_K: six bits each, from group 4 on in two places."""
    s, m, low = simd.get_u8(src + (i & 3)), simd.get_u8(src + 4 + (i & 3)), simd.get_u8(src + 8 + (i & 3))
    if i < 4:
        return s & 63, m & 63
    return low & 15 | (s & 0xC0) >> 2, low >> 4 | (m & 0xC0) >> 2


@inline
def _q4_k(src, dst):
    d, dmin = simd.get_f16(src), simd.get_f16(src + 2)
    for i in range(8):
        s, m = _scale_min(src + 4, i)
        for half in range(2):
            q = simd.load_u8(src + 16 + (i >> 1) * 32 + 16 * half) >> (i & 1) * 4 & 15
            simd.store_f32(dst + 128 * i + 64 * half, simd.to_f32(q) * (d * _f32(s)) - dmin * _f32(m))


@inline
def _q5_k(src, dst):
    d, dmin = simd.get_f16(src), simd.get_f16(src + 2)
    for i in range(8):
        s, m = _scale_min(src + 4, i)
        for half in range(2):
            q = simd.load_u8(src + 48 + (i >> 1) * 32 + 16 * half) >> (i & 1) * 4 & 15
            q = q | (simd.load_u8(src + 16 + 16 * half) >> i & 1) << 4
            simd.store_f32(dst + 128 * i + 64 * half, simd.to_f32(q) * (d * _f32(s)) - dmin * _f32(m))


@inline
def _q6_k(src, dst):
    d = simd.get_f16(src + 208)
    for g in range(16):
        low = simd.load_u8(src + (g >> 3) * 64 + (g & 3) * 16) >> (g >> 2 & 1) * 4 & 15
        q = simd.to_f32((low | _pair(src + 128, g) << 4) - 32)
        simd.store_f32(dst + 64 * g, q * (d * _f32(simd.get_i8(src + 192 + g))))


# Types whose codes are positions in a table of 16 bytes: it is held in four words of which each lane picks its byte.

def _words(values):
    return tuple(int(w) for w in values.astype(np.int8).view("<i4"))


_A0, _A1, _A2, _A3 = _words(IQ4_VALUES)
_B0, _B1, _B2, _B3 = _words(E2M1_DOUBLED)


@inline
def _byte(code, w0, w1, w2, w3):
    low = simd.select(code < 4, simd.splat_i32(w0), simd.splat_i32(w1))
    high = simd.select(code < 12, simd.splat_i32(w2), simd.splat_i32(w3))
    return simd.select(code < 8, low, high) << (24 - ((code & 3) << 3)) >> 24


@inline
def iq4_values(code):
    """What 16 codes of IQ4_NL stand for."""
    return simd.to_f32(_byte(code, _A0, _A1, _A2, _A3))


@inline
def iq4_value(code):
    """What one code of IQ4_NL stands for."""
    word = (_A0 if code < 4 else _A1) if code < 8 else (_A2 if code < 12 else _A3)
    byte = word >> 8 * (code & 3) & 255
    return _f32(byte - 256 if byte > 127 else byte)


@inline
def _iq4_nl(src, dst):
    d, q = simd.get_f16(src), simd.load_u8(src + 2)
    simd.store_f32(dst, iq4_values(q & 15) * d)
    simd.store_f32(dst + 64, iq4_values(q >> 4) * d)


@inline
def _iq4_xs(src, dst):
    d, high = simd.get_f16(src), simd.get_u16(src + 2)
    for i in range(8):
        s = simd.get_u8(src + 4 + (i >> 1)) >> (i & 1) * 4 & 15 | (high >> 2 * i & 3) << 4
        q = simd.load_u8(src + 8 + 16 * i)
        simd.store_f32(dst + 128 * i, iq4_values(q & 15) * (d * _f32(s - 32)))
        simd.store_f32(dst + 128 * i + 64, iq4_values(q >> 4) * (d * _f32(s - 32)))


@inline
def _mxfp4(src, dst):
    """The scale is 2^(e - 128), which is subnormal for e below 2."""
    e, q = simd.get_u8(src), simd.load_u8(src + 1)
    d = simd.as_f32(simd.splat_i32(0x200000 << e if e < 2 else e - 1 << 23))
    simd.store_f32(dst, simd.to_f32(_byte(q & 15, _B0, _B1, _B2, _B3)) * d)
    simd.store_f32(dst + 64, simd.to_f32(_byte(q >> 4, _B0, _B1, _B2, _B3)) * d)


@inline
def _nvfp4(src, dst):
    """Four groups of 16, each with a scale: half of 4 bits exponent and 3 bits mantissa; the byte 127 counts as 0."""
    for g in range(4):
        byte, q = simd.get_u8(src + g), simd.load_u8_n(src + 4 + 8 * g, 8)
        e = simd.iota() * 0 + (0 if byte == 127 else byte & 127)
        d = simd.select(e < 8, simd.to_f32(e) * 0.0009765625, simd.as_f32((e << 20) + (119 << 23)))
        simd.store_f32_n(dst + 64 * g, simd.to_f32(_byte(q & 15, _B0, _B1, _B2, _B3)) * d, 8)
        simd.store_f32_n(dst + 64 * g + 32, simd.to_f32(_byte(q >> 4, _B0, _B1, _B2, _B3)) * d, 8)


# Few bits and one scale.

@inline
def _q1_0(src, dst):
    d = simd.get_f16(src)
    for g in range(8):
        simd.store_f32(dst + 64 * g, simd.to_f32(_bits(src + 2 + 2 * g) * 2 - 1) * d)


@inline
def _q2_0(src, dst):
    """Four neighbours in a byte."""
    d = simd.get_f16(src)
    for g in range(4):
        q = simd.iota() * 0 + simd.get_i32(src + 2 + 4 * g) >> simd.iota() * 2 & 3
        simd.store_f32(dst + 64 * g, simd.to_f32(q - 1) * d)


@inline
def _tq2_0(src, dst):
    d = simd.get_f16(src + 64)
    for g in range(16):
        simd.store_f32(dst + 64 * g, simd.to_f32(_pair(src, g) - 1) * d)


@inline
def _trits(q, power):
    """A digit of 16 bytes: `power` of 3 drops those before it, what then exceeds 256 in three times that is it."""
    return (q * power & 255) * 3 >> 8


@inline
def _tq1_0(src, dst):
    """Digits of 32 bytes, five of each; of 16 bytes, five of each; of 4 bytes, four of each."""
    d, power = simd.get_f16(src + 52), 1
    for i in range(5):
        for half in range(2):
            q = _trits(simd.load_u8(src + 16 * half), power)
            simd.store_f32(dst + 128 * i + 64 * half, simd.to_f32(q - 1) * d)
        simd.store_f32(dst + 640 + 64 * i, simd.to_f32(_trits(simd.load_u8(src + 32), power) - 1) * d)
        if i < 4:
            q = _trits(simd.load_u8_n(src + 48, 4), power)
            simd.store_f32_n(dst + 960 + 16 * i, simd.to_f32(q - 1) * d, 4)
        power *= 3


_BLOCKS = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
           "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
           "NVFP4": _nvfp4, "Q1_0": _q1_0, "Q2_0": _q2_0, "TQ1_0": _tq1_0, "TQ2_0": _tq2_0}


def unpacks(type: DType) -> bool:
    return type.name in _BLOCKS or type.name in unpack_grid.BLOCKS


def _block(name: str):
    """f(src, dst) for one block of a type."""
    if name in _BLOCKS:
        return _BLOCKS[name]
    block, points = unpack_grid.BLOCKS[name], simd.data(grid("IQ1_S" if name == "IQ1_M" else name).tobytes())
    return inline(lambda src, dst: block(src, dst, points()))


def unpacker(type: DType):
    """f(src, dst, n): n elements of a row of this type at src become float32 at dst."""
    block, size, nbytes = _block(type.name), type.block, type.nbytes

    @inline
    def f(src, dst, n):
        for i in range(n // size):
            block(src + nbytes * i, dst + 4 * size * i)
    return f
