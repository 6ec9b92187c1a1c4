"""Rows of a KV cache made ready for `attention_tile`: keys turned into columns, values row by row.

Comes in: addresses of rows of any type that a cache holds. Goes out: numbers in scratch memory, where products read
them. Must not know: heads, tokens, masks. Like `simd` it loads Numba, so it is imported when a kernel is made.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ggraph import dtypes
from ggraph.dtypes import BF16, F16, F32, DType

from . import simd
from .attention_block import PANEL
from .attention_tile import multiply, store_columns, store_words
from .kernel import inline
from .unpack import unpacker

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

_PLAIN = {F32: (simd.load_f32, simd.load_f32_n), F16: (simd.load_f16, simd.load_f16_n),
          BF16: (simd.load_bf16, simd.load_bf16_n)}
Function = Callable[..., Any]


def product(name: str, listed: bool = False, hint: bool = False, more: bool = False) -> Function:
    """(a, lda, x, block, ldx, n, c, ldc, rows, vectors, near, ahead): `multiply` for any number of rows and vectors.
    Four vectors lie side by side; the next four `block` bytes further on, or side by side too where rows are listed."""
    size = 16 * dtypes.TYPES[name].nbytes
    wide = _tall([multiply(rows, 4, name, listed, more, hint and rows < 6) for rows in (6, 4, 3, 2, 1)])
    slim = _low(*[multiply(rows, 1, name, listed, more) for rows in (6, 1)])

    @inline
    def f(a, lda, x, block, ldx, n, c, ldc, rows, vectors, near, ahead):
        whole = vectors & -4
        for v in range(0, whole, 4):
            if listed:
                wide(a, lda, x, ldx + v * size, n, c + 64 * v, ldc, rows, near, ahead)
            else:
                wide(a, lda, x + (v >> 2) * block, ldx, n, c + 64 * v, ldc, rows, near + 128 * v, ahead)
        for v in range(whole, vectors):
            if listed:
                slim(a, lda, x, ldx + v * size, n, c + 64 * v, ldc, rows)
            else:
                slim(a, lda, x + (v >> 2) * block + (v & 3) * size, ldx, n, c + 64 * v, ldc, rows)
    return f


def _tall(multiplies: list[Any]) -> Function:
    """All rows of a. Every height up to 4 has its own loop, since that is all there is when one token is decoded."""
    six, four, three, two, one = multiplies

    @inline
    def f(a, lda, x, ldx, n, c, ldc, rows, near, ahead):
        while rows >= 6:
            six(a, lda, x, ldx, n, c, ldc, near, ahead)
            a, c, rows = a + 6 * lda, c + 6 * ldc, rows - 6
        if rows >= 4:
            four(a, lda, x, ldx, n, c, ldc, near, ahead)
            a, c, rows = a + 4 * lda, c + 4 * ldc, rows - 4
        if rows == 3:
            three(a, lda, x, ldx, n, c, ldc, near, ahead)
        elif rows == 2:
            two(a, lda, x, ldx, n, c, ldc, near, ahead)
        elif rows == 1:
            one(a, lda, x, ldx, n, c, ldc, near, ahead)
    return f


def _low(six: Any, one: Any) -> Function:
    @inline
    def f(a, lda, x, ldx, n, c, ldc, rows):
        while rows >= 6:
            six(a, lda, x, ldx, n, c, ldc, 0, 0)
            a, c, rows = a + 6 * lda, c + 6 * ldc, rows - 6
        for _ in range(rows):
            one(a, lda, x, ldx, n, c, ldc, 0, 0)
            a, c = a + lda, c + ldc
    return f


def columns(name: str, wide: bool) -> tuple[str, Function]:
    """The type that columns of keys have, and (rows, n, dst, spare): of the 16 rows whose addresses stand at `rows`,
    number k becomes 16 in a row at dst, PANEL numbers further on for each k. `spare`: room for 16 rows of float32;
    `wide`: n is never less than 32."""
    type = dtypes.TYPES[name]
    if type.nbytes == 2 and wide:
        return name, _turn_words
    if type in _PLAIN:
        turn = _turn(type)

        @inline
        def plain(rows, n, dst, spare):
            turn(_addresses(rows), n, dst)
        return "F32", plain
    unpack, turn = unpacker(type), _turn(F32)

    @inline
    def packed(rows, n, dst, spare):
        for i in range(16):
            unpack(simd.get_i64(rows + 8 * i), spare + 4 * n * i, n)
        turn(_evenly(spare, 4 * n), n, dst)
    return "F32", packed


def _turn(type: DType) -> Function:
    (load, load_n), size, stride = _PLAIN[type], type.nbytes, 4 * PANEL

    @inline
    def f(r, n, dst):
        (r0, r1, r2, r3, r4, r5, r6, r7, r8, r9, r10, r11, r12, r13, r14, r15) = r
        whole = n & -16
        for k in range(0, whole, 16):
            i = k * size
            store_columns(dst + k * stride, stride, load(r0 + i), load(r1 + i), load(r2 + i), load(r3 + i),
                          load(r4 + i), load(r5 + i), load(r6 + i), load(r7 + i), load(r8 + i), load(r9 + i),
                          load(r10 + i), load(r11 + i), load(r12 + i), load(r13 + i), load(r14 + i), load(r15 + i))
        if whole < n:
            i, m = whole * size, n - whole
            store_columns(dst + whole * stride, stride, load_n(r0 + i, m), load_n(r1 + i, m), load_n(r2 + i, m),
                          load_n(r3 + i, m), load_n(r4 + i, m), load_n(r5 + i, m), load_n(r6 + i, m),
                          load_n(r7 + i, m), load_n(r8 + i, m), load_n(r9 + i, m), load_n(r10 + i, m),
                          load_n(r11 + i, m), load_n(r12 + i, m), load_n(r13 + i, m), load_n(r14 + i, m),
                          load_n(r15 + i, m))
    return f


@inline
def _turn_words(rows, n, dst, spare):
    (r0, r1, r2, r3, r4, r5, r6, r7, r8, r9, r10, r11, r12, r13, r14, r15) = _addresses(rows)
    """Runs of 32; the last one may repeat a part of the one before."""
    stride, load = 2 * PANEL, simd.load_bytes
    for start in range(0, n, 32):
        k = min(start, n - 32)
        i = 2 * k
        store_words(dst + k * stride, stride, load(r0 + i), load(r1 + i), load(r2 + i), load(r3 + i), load(r4 + i),
                    load(r5 + i), load(r6 + i), load(r7 + i), load(r8 + i), load(r9 + i), load(r10 + i), load(r11 + i),
                    load(r12 + i), load(r13 + i), load(r14 + i), load(r15 + i))


@inline
def _addresses(p):
    return (simd.get_i64(p), simd.get_i64(p + 8), simd.get_i64(p + 16), simd.get_i64(p + 24), simd.get_i64(p + 32),
            simd.get_i64(p + 40), simd.get_i64(p + 48), simd.get_i64(p + 56), simd.get_i64(p + 64),
            simd.get_i64(p + 72), simd.get_i64(p + 80), simd.get_i64(p + 88), simd.get_i64(p + 96),
            simd.get_i64(p + 104), simd.get_i64(p + 112), simd.get_i64(p + 120))


@inline
def _evenly(p, step):
    return (p, p + step, p + 2 * step, p + 3 * step, p + 4 * step, p + 5 * step, p + 6 * step, p + 7 * step,
            p + 8 * step, p + 9 * step, p + 10 * step, p + 11 * step, p + 12 * step, p + 13 * step, p + 14 * step,
            p + 15 * step)


def values(name: str, whole: bool) -> tuple[str, Function]:
    """The type in which values are multiplied, and (rows, m, n, dst, ahead): make the m rows of n numbers whose
    addresses stand at `rows` ready for that. Where they must be converted, to dst, their new addresses replace the old
    ones, and what lies `ahead` bytes behind them is brought near. `whole`: n is always a multiple of 16."""
    type = dtypes.TYPES[name]
    if type in _PLAIN and whole:
        @inline
        def stay(rows, m, n, dst, ahead):
            pass
        return name, stay
    convert, block, nbytes = _padded(type) if type in _PLAIN else unpacker(type), type.block, type.nbytes

    @inline
    def move(rows, m, n, dst, ahead):
        for i in range(m):
            row, place = simd.get_i64(rows + 8 * i), dst + i * 4 * (n + 15 & -16)
            for j in range(0, n * nbytes // block, 64):
                simd.prefetch(row + ahead + j)
            convert(row, place, n)
            simd.put_i64(rows + 8 * i, place)
    return "F32", move


def _padded(type: DType) -> Function:
    """(src, dst, n): n float32, rounded up to a multiple of 16 with zeros."""
    (_, load_n), size = _PLAIN[type], type.nbytes

    @inline
    def f(src, dst, n):
        for i in range(0, n, 16):
            simd.store_f32(dst + 4 * i, load_n(src + size * i, n - i))
    return f
