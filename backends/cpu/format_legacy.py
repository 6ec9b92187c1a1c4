"""Panel formats of the types with blocks of 32: Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 IQ4_NL MXFP4."""
from __future__ import annotations

from ggraph import dtypes

from .formats import Format, spread_bits
from .kernel import inline, simd

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)              # doubled
IQ4_CODES, FP4_CODES = tuple(v + 128 for v in _IQ4), tuple(v + 16 for v in _FP4)


@inline
def nibble(src, g):
    """Codes of group g where byte j holds k = j (low) and k = j + 16 (high)."""
    return simd.get_i32(src + 4 * (g & 3)) >> (g & 4) & 0x0F0F0F0F


@inline
def fifth(src, g):
    """Bits 4g .. 4g + 3 of a 32-bit field, as bit 4 of four bytes."""
    return spread_bits(simd.get_i32(src) >> 4 * g) << 4


@inline
def code_q4_0(src, i, g):
    return nibble(src + 2, g)


@inline
def code_q4_1(src, i, g):
    return nibble(src + 4, g)


@inline
def code_q5_0(src, i, g):
    return nibble(src + 6, g) | fifth(src + 2, g)


@inline
def code_q5_1(src, i, g):
    return nibble(src + 8, g) | fifth(src + 4, g)


@inline
def code_q8_0(src, i, g):
    return simd.get_i32(src + 2 + 4 * g) ^ 0x80808080                          # + 128


@inline
def code_mxfp4(src, i, g):
    return nibble(src + 1, g)


@inline
def head_d(src, dst, r):
    simd.put_u16(dst + 2 * r, simd.get_u16(src))


@inline
def head_dm(src, dst, r):
    simd.put_u16(dst + 2 * r, simd.get_u16(src))
    simd.put_u16(dst + 32 + 2 * r, simd.get_u16(src + 2))


@inline
def head_e(src, dst, r):
    simd.put_u8(dst + r, simd.get_u8(src))


@inline
def scale_d(head, i):
    return (simd.load_f16(head),)


@inline
def scale_dm(head, i):
    return simd.load_f16(head), simd.load_f16(head + 32)


@inline
def scale_e(head, i):
    e = simd.load_u8(head)                                                     # 2^(e - 128); below 2 it is subnormal
    return (simd.as_f32(simd.select(e < 2, simd.splat_i32(0x200000) << e, (e - 1) << 23)),)


Format(dtypes.Q4_0, 4, 32, code_q4_0, head_d, scale_d, bias=8)
Format(dtypes.Q4_1, 4, 64, code_q4_1, head_dm, scale_dm, mins=True)
Format(dtypes.Q5_0, 5, 32, code_q5_0, head_d, scale_d, bias=16)
Format(dtypes.Q5_1, 5, 64, code_q5_1, head_dm, scale_dm, mins=True)
Format(dtypes.Q8_0, 8, 32, code_q8_0, head_d, scale_d, bias=128)
Format(dtypes.IQ4_NL, 4, 32, code_q4_0, head_d, scale_d, bias=128, table=IQ4_CODES)
Format(dtypes.MXFP4, 4, 16, code_mxfp4, head_e, scale_e, bias=16, table=FP4_CODES)
