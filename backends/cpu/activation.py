"""Activations as products with panels want them: in tiles, and in the form that the weights ask for.

Comes in: an f32 tensor [k, n tokens]. Goes out: kernels that write its tiles. Must not know: weights.

n tokens lie in tiles of `width()` tokens, then a rest in tiles of half the width, and so on, so that a product finds
its columns at constant distances; tile t of T tokens starts where the tokens before it end. In a tile: for quantized
weights [k / 32][T] blocks (see `tile`), for F32 and F16 weights f32 [k][T], for BF16 weights [k / 2][T] pairs of bf16, of which
the last may be half zero. Or in rows: all tiles have width 1.

In blocks values are rounded to the nearest multiple of largest magnitude / 127, ties to even, and then count as multiples of d,
which is that step rounded to f16, and so is d times their sum for Q4_1 and Q5_1, as in llama.cpp's q8_0 and q8_1: then
close calls (which expert, which token) fall the same way. Where f16 has no normal number for it, either stays
f32. Blocks with NaN or infinity give d = NaN or infinity, blocks below 1e-36 count as zero.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ggraph import dtypes
from ggraph.dtypes import DType

from . import targets
from .kernel import Kernel, inline, simd, template
from .layout import COLUMNS, TOKENS, share

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

BLOCK = 48                                          # bytes of a block of 32 values
_F16_MIN, _F16_MAX = np.float32(2.0 ** -14), np.float32(65504.0)     # normal numbers
_ONE, _LEAST, _127 = np.float32(1.0), np.float32(1e-36), np.float32(127.0)


class Form(NamedTuple):
    """How values of a column lie together: so many in so many bytes."""
    name: str
    length: int
    nbytes: int


Q8, F32, BF16 = Form("q8", 32, BLOCK), Form("f32", 1, 4), Form("bf16", 2, 4)
FORMS = {f.name: f for f in (Q8, F32, BF16)}


def form(weights: DType) -> Form:
    """What products with weights of a type take."""
    return BF16 if weights is dtypes.BF16 else F32 if weights in (dtypes.F32, dtypes.F16) else Q8


def width() -> int:
    """Most columns that one pass over the weights serves: what the registers of the target hold. A power of two."""
    return 8 if targets.current().lowering == "avx512vnni" else 4


def nbytes(form: Form, k: int, n_tokens: int) -> int:
    """Bytes of the tiles of `n_tokens` columns (an integer or a size that is only known later)."""
    return n_tokens * (-(-k // form.length) * form.nbytes)


def activation_kernel(form: Form, rows: bool = False) -> Kernel:
    """Parameters: src, 9 words, f32 [k, n, ..] with contiguous k | address of the tiles | how it is cut (`join`).
    `rows`: width 1."""
    return {Q8: _quantize, F32: _copy, BF16: _pair}[form](1 if rows else width())


@inline
def tile_of(t, n, width):
    """(first token, width) of the tile that holds token t of n."""
    first = n // width * width
    if t < first:
        return t // width * width, width
    width >>= 1
    while n & width == 0 or t >= first + width:
        first += n & width
        width >>= 1
    return first, width


@inline
def row_of(p, t):
    """Address of row t of the tensor whose words are at p, its outer axes counted through."""
    n1, n2 = simd.word(p, 2), simd.word(p, 3)
    i1, i2, i3 = t % n1, t // n1 % n2, t // (n1 * n2)
    return simd.word(p, 0) + i1 * simd.word(p, 6) + i2 * simd.word(p, 7) + i3 * simd.word(p, 8)


@inline
def round_f16(spare, x):
    """x as f16 has it, where f16 has a normal number for it; `spare`: where 2 bytes may be written."""
    if abs(x) < _F16_MIN or abs(x) > _F16_MAX:
        return x
    simd.put_f16(spare, x)
    return simd.get_f16(spare)


@inline
def quantize(src, dst):
    """32 f32 into a block."""
    x, y = simd.load_f32(src), simd.load_f32(src + 64)
    # Magnitudes as integers keep their order, and NaN is above all.
    bits = simd.maximum(simd.as_i32(simd.absolute(x)), simd.as_i32(simd.absolute(y)))
    largest = simd.bits_f32(simd.hmax(bits))
    scale = _127 / largest if largest > _LEAST else largest - largest
    magic = simd.splat_f32(12582912.0)                                     # 1.5 * 2^23 rounds to an integer
    q0 = simd.as_i32(simd.splat_f32(scale) * x + magic) - 0x4B400000
    q1 = simd.as_i32(simd.splat_f32(scale) * y + magic) - 0x4B400000
    d, sum0, sum1 = largest * (_ONE / _127), simd.hsum(q0), simd.hsum(q1)
    d = round_f16(dst, d)
    simd.put_f32(dst, d)
    simd.put_f32(dst + 4, round_f16(dst + 4, d * np.float32(sum0 + sum1)))
    simd.put_i32(dst + 8, sum0 + sum1)
    simd.put_i32(dst + 12, sum0)
    simd.store_i8(dst + 16, q0)
    simd.store_i8(dst + 32, q1)


@template
def _quantize(width: int) -> Callable[..., None]:
    def quantize_tiles(p, ith, nth):
        dst, k = simd.word(p, 9), simd.word(p, 1)
        n, blocks, how = simd.word(p, 2) * simd.word(p, 3) * simd.word(p, 4), k // 32, simd.word(p, 10)
        if how == COLUMNS:
            start, end = share(blocks, ith, nth)
            for t in range(n):
                blocks_of(p, dst, t, n, blocks, start, end)
        elif how == TOKENS or n >= nth:
            start, end = share(n, ith, nth)
            for t in range(start, end):
                blocks_of(p, dst, t, n, blocks, 0, blocks)
        else:
            start, end = share(n * blocks, ith, nth)
            for t in range(start // blocks, (end + blocks - 1) // blocks):
                blocks_of(p, dst, t, n, blocks, max(start - t * blocks, 0), min(end - t * blocks, blocks))

    @inline
    def blocks_of(p, dst, t, n, blocks, start, end):
        first, w = tile_of(t, n, width)
        src, to = row_of(p, t), dst + BLOCK * (first * blocks + t - first)
        for b in range(start, end):
            quantize(src + 128 * b, to + BLOCK * w * b)
    return quantize_tiles


@inline
def part(n, k, how, ith, nth):
    """A thread's share of n columns of k values: first column and one past the last, the same of values (begins are even)."""
    if how == COLUMNS:
        begin, stop = share((k + 31) // 32, ith, nth)
        return 0, n, 32 * begin, min(32 * stop, k)
    start, end = share(n, ith, nth)
    return start, end, 0, k


@template
def _copy(width: int) -> Callable[..., None]:
    def copy_tiles(p, ith, nth):
        dst, k = simd.word(p, 9), simd.word(p, 1)
        n = simd.word(p, 2) * simd.word(p, 3) * simd.word(p, 4)
        start, end, begin, stop = part(n, k, simd.word(p, 10), ith, nth)
        for t in range(start, end):
            src = row_of(p, t)
            first, w = tile_of(t, n, width)
            at = dst + 4 * (first * k + t - first)
            for i in range(begin, stop):
                simd.put_f32(at + 4 * w * i, simd.get_f32(src + 4 * i))
    return copy_tiles


@template
def _pair(width: int) -> Callable[..., None]:
    def pair_tiles(p, ith, nth):
        dst, k = simd.word(p, 9), simd.word(p, 1)
        n, pairs = simd.word(p, 2) * simd.word(p, 3) * simd.word(p, 4), (k + 1) // 2
        start, end, begin, stop = part(n, k, simd.word(p, 10), ith, nth)
        for t in range(start, end):
            src = row_of(p, t)
            first, w = tile_of(t, n, width)
            at = dst + 4 * (first * pairs + t - first)
            for i in range(begin // 2, (stop + 1) // 2):
                simd.put_bf16(at + 4 * w * i, simd.get_f32(src + 8 * i))
                simd.put_bf16(at + 4 * w * i + 2, simd.get_f32(src + 8 * i + 4) if 2 * i + 1 < k else np.float32(0.0))
    return pair_tiles
