"""Panel formats of types with scales for 16, 64, 128 or 256 and plain small codes: NVFP4 Q1_0 Q2_0 TQ1_0 TQ2_0."""
from __future__ import annotations

from ggraph import dtypes

from .format_k import code_q2_k
from .format_legacy import FP4_CODES, head_d, scale_d
from .formats import Format, spread_bits
from .kernel import inline, simd

# mypy: disable-error-code="no-untyped-def, no-untyped-call"


# NVFP4: u8 scales [4][16 rows], one per 16.

@inline
def head_nvfp4(src, dst, r):
    for j in range(4):
        simd.put_u8(dst + 16 * j + r, simd.get_u8(src + j))


@inline
def ue4m3(x):
    """Half the value of 4 bits exponent, 3 bits mantissa; below 8 it is subnormal. The byte 127 counts as 0."""
    n = x & 127
    normal = simd.as_f32((n << 20) + (119 << 23))
    return simd.select(n < 8, simd.to_f32(n) * 2.0 ** -10, simd.select(x == 127, simd.splat_f32(0.0), normal))


@inline
def scale_nvfp4(head, i):
    return ue4m3(simd.load_u8(head + 32 * i)), ue4m3(simd.load_u8(head + 32 * i + 16))


@inline
def code_nvfp4(src, i, g):
    """8 bytes per 16 k: low nibbles the first 8, high nibbles the others."""
    return simd.get_i32(src + 4 + 16 * i + 8 * (g >> 2) + 4 * (g & 1)) >> 2 * (g & 2) & 0x0F0F0F0F


# Q1_0: c d2 - d. Q2_0: four neighbours in a byte.

@inline
def scale_q1_0(head, i):
    d = simd.load_f16(head)
    return d + d, -d


@inline
def code_q1_0(src, i, g):
    return spread_bits(simd.get_u8(src + 2 + 4 * i + (g >> 1)) >> 4 * (g & 1))


@inline
def code_q2_0(src, i, g):
    x = simd.get_u8(src + 2 + 8 * i + g)
    return x & 3 | (x & 12) << 6 | (x & 48) << 12 | (x & 192) << 18


# TQ1_0, TQ2_0: f16 d at the end of the block.

@inline
def head_tq1_0(src, dst, r):
    head_d(src + 52, dst, r)


@inline
def head_tq2_0(src, dst, r):
    head_d(src + 64, dst, r)


@inline
def trits(src, n):
    """Digit n of four bytes: 3^n x drops the digits before it, what exceeds 256 in three times that is the digit."""
    x, power = simd.get_i32(src), 1
    for _ in range(n):
        power *= 3
    out = 0
    for j in range(4):
        out |= ((x >> 8 * j & 255) * power & 255) * 3 >> 8 << 8 * j
    return out


@inline
def code_tq1_0(src, i, g):
    """Digits of 32 bytes, five of each; of 16 bytes, five of each; of 4 bytes, four of each."""
    at = 32 * (i - 5) + 4 * g
    if i < 5:
        return trits(src + 4 * g, i)
    if at < 80:
        return trits(src + 32 + (at & 15), at >> 4)
    return trits(src + 48, (at - 80) >> 2)


@inline
def code_tq2_0(src, i, g):
    return code_q2_k(src - 16, i, g)                                          # as there, at byte 0


Format(dtypes.NVFP4, 4, 64, code_nvfp4, head_nvfp4, scale_nvfp4, wide=16, bias=16, table=FP4_CODES)
Format(dtypes.Q1_0, 1, 32, code_q1_0, head_d, scale_q1_0, mins=True)
Format(dtypes.Q2_0, 2, 32, code_q2_0, head_d, scale_d, bias=1)
Format(dtypes.TQ1_0, 2, 32, code_tq1_0, head_tq1_0, scale_d, bias=1)
Format(dtypes.TQ2_0, 2, 32, code_tq2_0, head_tq2_0, scale_d, bias=1)
