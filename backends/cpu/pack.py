"""Rows of float32 to quantized blocks, in the registers of a kernel: the types that a KV cache can hold.

Comes in: the address of float32. Goes out: blocks, the same bits as `ggraph.quants.pack` gives.
Must not know: ops. The arithmetic is float32 in the same order as there, with the first of equal extremes as there.
"""
from __future__ import annotations

import numpy as np

from ggraph.dtypes import DType

from .kernel import inline, simd
from .unpack import iq4_value

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

_f32 = np.float32


@inline
def _key(hit, x, behind):
    """Larger, the further to the front: where `hit` holds, and far above that where x is NaN."""
    order = 32 - behind - simd.iota()
    return simd.select(x == x, simd.select(hit, order, simd.splat_i32(0)), order + 64)


@inline
def _first(src, hit_a, a, hit_b, b):
    """The first of the 32 elements that is hit, or is NaN."""
    key = simd.hmax(simd.maximum(_key(hit_a, a, 0), _key(hit_b, b, 16)))
    return simd.get_f32(src + 4 * (32 - (key & 63)))


@inline
def _extreme(src, a, b):
    """The first element of largest magnitude, with its sign; +0.0 for zeros."""
    x, y = simd.absolute(a), simd.absolute(b)
    top = simd.hmax(simd.maximum(x, y))
    return _first(src, x == top, a, y == top, b) + _f32(0)


@inline
def _inverse(d):
    return _f32(0) if d == _f32(0) else _f32(1) / d


@inline
def _code(x, top):
    """Truncated to 0 .. top; what is not finite becomes 0."""
    x = simd.select(simd.absolute(x) < float("inf"), x, simd.splat_f32(0.0))
    return simd.minimum(simd.to_i32(x), simd.splat_i32(top))


@inline
def _put_halves(dst, a, b):
    simd.store_u8(dst, a & 15 | b << 4)


@inline
def _put_fifth_bits(dst, a, b):
    simd.put_u16(dst, simd.hsum((a >> 4) << simd.iota()))
    simd.put_u16(dst + 2, simd.hsum((b >> 4) << simd.iota()))


@inline
def _symmetric(src, dst, half):
    """Codes 0 .. 2 half - 1, the element of largest magnitude 0; stores d."""
    a, b = simd.load_f32(src), simd.load_f32(src + 64)
    d = _extreme(src, a, b) / _f32(-half)
    simd.put_f16(dst, d)
    s = _inverse(d)
    return _code(a * s + (half + 0.5), 2 * half - 1), _code(b * s + (half + 0.5), 2 * half - 1)


@inline
def _affine(src, dst, top):
    """Codes 0 .. top of d code + m; stores d and m."""
    a, b = simd.load_f32(src), simd.load_f32(src + 64)
    most, least = simd.hmax(simd.maximum(a, b)), -simd.hmax(simd.maximum(-a, -b))
    high, low = _first(src, a == most, a, b == most, b), _first(src, a == least, a, b == least, b)
    d = (high - low) / _f32(top)
    simd.put_f16(dst, d)
    simd.put_f16(dst + 2, low)
    s = _inverse(d)
    return _code((a - low) * s + 0.5, top), _code((b - low) * s + 0.5, top)


@inline
def _q4_0(src, dst):
    a, b = _symmetric(src, dst, 8)
    _put_halves(dst + 2, a, b)


@inline
def _q4_1(src, dst):
    a, b = _affine(src, dst, 15)
    _put_halves(dst + 4, a, b)


@inline
def _q5_0(src, dst):
    a, b = _symmetric(src, dst, 16)
    _put_fifth_bits(dst + 2, a, b)
    _put_halves(dst + 6, a, b)


@inline
def _q5_1(src, dst):
    a, b = _affine(src, dst, 31)
    _put_fifth_bits(dst + 4, a, b)
    _put_halves(dst + 8, a, b)


@inline
def _round(x):
    """Halves away from zero; what is not finite becomes 0."""
    x = simd.select(simd.absolute(x) < float("inf"), x, simd.splat_f32(0.0))
    whole = simd.to_i32(x)
    return whole + simd.to_i32((x - simd.to_f32(whole)) * 2.0)


@inline
def _q8_0(src, dst):
    a, b = simd.load_f32(src), simd.load_f32(src + 64)
    d = abs(_extreme(src, a, b)) / _f32(127)
    simd.put_f16(dst, d)
    s = _inverse(d)
    simd.store_i8(dst + 2, _round(a * s))
    simd.store_i8(dst + 18, _round(b * s))


@inline
def _nearest(x):
    """Position of the nearest table value; the upper of two that are as near, and the last for NaN."""
    code = simd.splat_i32(0)
    one, zero = simd.splat_i32(1), simd.splat_i32(0)
    for k in range(15):
        code += simd.select(x - iq4_value(k) >= iq4_value(k + 1) - x, one, zero)
    return simd.select(x == x, code, simd.splat_i32(15))


@inline
def _iq4_nl(src, dst):
    """The codes come from a first scale; the scale stored is then the one that fits these codes best."""
    a, b = simd.load_f32(src), simd.load_f32(src + 64)
    extreme = _extreme(src, a, b)
    tiny = abs(extreme) < _f32(1e-15)
    s = _f32(0) if tiny else _f32(1) / (extreme / iq4_value(0))
    i, j = _nearest(a * s), _nearest(b * s)
    _put_halves(dst + 2, i, j)
    qx = q2 = _f32(0)
    for k in range(32):                                                # from left to right, as the C loop adds
        code = simd.get_u8(dst + 2 + (k & 15)) >> (k >> 4) * 4 & 15
        x, q = simd.get_f32(src + 4 * k), iq4_value(code)
        qx += x * x * q * x
        q2 += x * x * q * q
    d = qx / q2 if q2 > _f32(0) else _f32(0)
    simd.put_f16(dst, extreme if extreme != extreme else _f32(0) if tiny else d)


_BLOCKS = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "IQ4_NL": _iq4_nl}


def packs(type: DType) -> bool:
    return type.name in _BLOCKS


def packer(type: DType):
    """f(src, dst, n): n float32 at src become a row of this type at dst."""
    block, size, nbytes = _BLOCKS[type.name], type.block, type.nbytes

    @inline
    def f(src, dst, n):
        for i in range(n // size):
            block(src + 4 * size * i, dst + nbytes * i)
    return f
