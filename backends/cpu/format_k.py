"""Panel formats of the types with superblocks of 256: Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_XS."""
from __future__ import annotations

from ggraph import dtypes

from .format_legacy import IQ4_CODES
from .formats import Format
from .kernel import inline, simd

# mypy: disable-error-code="no-untyped-def, no-untyped-call"


# Two 6-bit numbers a, b per block of 32: bytes a & 15 | (b & 15) << 4 as u8 [8][16 rows], then per row an i32 with
# the upper bits, a >> 4 | (b >> 4) << 2 at bit 4i.

@inline
def put_pair(dst, r, i, a, b):
    simd.put_u8(dst + 16 * i + r, a & 15 | (b & 15) << 4)
    upper = dst + 128 + 4 * r
    kept = 0 if i == 0 else simd.get_i32(upper)
    simd.put_i32(upper, kept | (a >> 4 | b >> 4 << 2) << 4 * i)


@inline
def pair(head, i):
    lower, upper = simd.load_u8(head + 16 * i), simd.load_i32(head + 128) >> 4 * i
    return lower & 15 | (upper & 3) << 4, lower >> 4 | (upper & 12) << 2


# Q4_K, Q5_K: f16 d, dmin | pairs (scale, min).

@inline
def head_q4_k(src, dst, r):
    simd.put_u16(dst + 2 * r, simd.get_u16(src))
    simd.put_u16(dst + 32 + 2 * r, simd.get_u16(src + 2))
    for i in range(8):
        low = src + 4 + (i & 3)
        if i < 4:
            put_pair(dst + 64, r, i, simd.get_u8(low) & 63, simd.get_u8(low + 4) & 63)
        else:
            x = simd.get_u8(low + 8)
            put_pair(dst + 64, r, i, x & 15 | simd.get_u8(low) >> 6 << 4, x >> 4 | simd.get_u8(low + 4) >> 6 << 4)


@inline
def scale_q4_k(head, i):
    a, b = pair(head + 64, i)
    return simd.load_f16(head) * simd.to_f32(a), -simd.load_f16(head + 32) * simd.to_f32(b)


@inline
def nibble_k(src, i, g):
    """64 k in 32 bytes: low nibbles the first 32, high nibbles the others."""
    return simd.get_i32(src + 32 * (i >> 1) + 4 * g) >> 4 * (i & 1) & 0x0F0F0F0F


@inline
def code_q4_k(src, i, g):
    return nibble_k(src + 16, i, g)


@inline
def code_q5_k(src, i, g):
    return nibble_k(src + 48, i, g) | (simd.get_i32(src + 16 + 4 * g) >> i & 0x01010101) << 4


# Q6_K: f16 d | i8 scales [16][16 rows].

@inline
def head_q6_k(src, dst, r):
    simd.put_u16(dst + 2 * r, simd.get_u16(src + 208))
    for j in range(16):
        simd.put_u8(dst + 32 + 16 * j + r, simd.get_u8(src + 192 + j))


@inline
def scale_q6_k(head, i):
    d, at = simd.load_f16(head), head + 32 + 32 * i
    return d * simd.to_f32(simd.load_i8(at)), d * simd.to_f32(simd.load_i8(at + 16))


@inline
def code_q6_k(src, i, g):
    """Blocks of 128 k: nibbles of block i & 3 at byte 32 * (i & 1), the upper half of a byte for i & 2."""
    low = simd.get_i32(src + 64 * (i >> 2) + 32 * (i & 1) + 4 * g) >> 2 * (i & 2) & 0x0F0F0F0F
    return low | (simd.get_i32(src + 128 + 32 * (i >> 2) + 4 * g) >> 2 * (i & 3) & 0x03030303) << 4


# Q2_K: f16 d, dmin | u8 [16][16 rows] of scale | min << 4.

@inline
def head_q2_k(src, dst, r):
    simd.put_u16(dst + 2 * r, simd.get_u16(src + 80))
    simd.put_u16(dst + 32 + 2 * r, simd.get_u16(src + 82))
    for j in range(16):
        simd.put_u8(dst + 64 + 16 * j + r, simd.get_u8(src + j))


@inline
def scale_q2_k(head, i):
    d, m, at = simd.load_f16(head), -simd.load_f16(head + 32), head + 64 + 32 * i
    x, y = simd.load_u8(at), simd.load_u8(at + 16)
    return d * simd.to_f32(x & 15), d * simd.to_f32(y & 15), m * simd.to_f32(x >> 4), m * simd.to_f32(y >> 4)


@inline
def code_q2_k(src, i, g):
    return simd.get_i32(src + 16 + 32 * (i >> 2) + 4 * g) >> 2 * (i & 3) & 0x03030303


# Q3_K: f16 d | pairs (scale of the first 16, of the last 16), each + 32.

@inline
def head_q3_k(src, dst, r):
    simd.put_u16(dst + 2 * r, simd.get_u16(src + 108))
    for i in range(8):
        at, shift = src + 96 + (2 * i & 7), i >> 2 << 2
        high, bits = src + 104 + (2 * i & 3), i >> 1 << 1
        put_pair(dst + 32, r, i, simd.get_u8(at) >> shift & 15 | (simd.get_u8(high) >> bits & 3) << 4,
                 simd.get_u8(at + 1) >> shift & 15 | (simd.get_u8(high + 1) >> bits & 3) << 4)


@inline
def scale_q3_k(head, i):
    d, (a, b) = simd.load_f16(head), pair(head + 32, i)
    return d * simd.to_f32(a - 32), d * simd.to_f32(b - 32)


@inline
def code_q3_k(src, i, g):
    low = simd.get_i32(src + 32 + 32 * (i >> 2) + 4 * g) >> 2 * (i & 3) & 0x03030303
    return low | (simd.get_i32(src + 4 * g) >> i & 0x01010101) << 2


# IQ4_XS: f16 d | i32 [16 rows], lower 4 bits of scale i at bit 4i | u16 [16 rows], its upper 2 bits at bit 2i.

@inline
def head_iq4_xs(src, dst, r):
    simd.put_u16(dst + 2 * r, simd.get_u16(src))
    simd.put_u16(dst + 96 + 2 * r, simd.get_u16(src + 2))
    simd.put_i32(dst + 32 + 4 * r, simd.get_i32(src + 4))


@inline
def scale_iq4_xs(head, i):
    lower, upper = simd.load_i32(head + 32) >> 4 * i, simd.load_u16(head + 96) >> 2 * i
    return (simd.load_f16(head) * simd.to_f32((lower & 15 | (upper & 3) << 4) - 32),)


@inline
def code_iq4_xs(src, i, g):
    return simd.get_i32(src + 8 + 16 * i + 4 * (g & 3)) >> (g & 4) & 0x0F0F0F0F


Format(dtypes.Q2_K, 2, 320, code_q2_k, head_q2_k, scale_q2_k, wide=16, mins=True)
Format(dtypes.Q3_K, 3, 224, code_q3_k, head_q3_k, scale_q3_k, wide=16, bias=4)
Format(dtypes.Q4_K, 4, 256, code_q4_k, head_q4_k, scale_q4_k, mins=True)
Format(dtypes.Q5_K, 5, 256, code_q5_k, head_q4_k, scale_q4_k, mins=True)
Format(dtypes.Q6_K, 6, 288, code_q6_k, head_q6_k, scale_q6_k, wide=16, bias=32)
Format(dtypes.IQ4_XS, 4, 128, code_iq4_xs, head_iq4_xs, scale_iq4_xs, bias=128, table=IQ4_CODES)
