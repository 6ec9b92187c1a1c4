"""Register tiles of products in float32, and the transpositions that feed them. Written as `simd` is, with `vector.op`.

Comes in: addresses. Goes out: c = a x, where a number of `a` is spread over the lanes of a vector of `x`. Must not
know: attention.

Every result is one chain of fma over k, in the order of k, whatever the tile: so it has the same bits in every tile.
"""
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from . import simd, targets
from .vector import F32, I16, I64, Builder, Value, const, f32x16, i8x64, op, pointer, shuffle, spread

_intp, _void = types.intp, types.void
_F, _WORDS = f32x16.ir, ir.VectorType(I16, 16)
# Rows x vectors of results that stay in registers, with room for a vector of x each and one of a.
_FIT = {"avx512vnni": (6, 4), "avxvnni": (2, 2), "avx2": (2, 2), "neon": (2, 2), "generic": (2, 1)}
_READ = {"F32": (_F, lambda b, x: x), "F16": (_WORDS, simd._f16_to_f32), "BF16": (_WORDS, simd._bf16_to_f32)}


def multiply(rows: int, vectors: int, name: str = "F32", listed: bool = False, more: bool = False, hint: bool = False
             ) -> Any:
    """(a, lda, x, ldx, n, c, ldc, near, ahead): c[r, v] = sum over k < n of a[r, k] * x[k, v], for n >= 1.

    a[r, k] is the float32 at a + r lda + 4 k, c[r, v] the 16 float32 at c + r ldc + 64 v. x[k] are 16 `vectors` numbers
    of type `name` in a row, at x + k ldx; `listed`: at ldx bytes from the k-th of the addresses that stand at x.
    `more`: added to c. `hint`: meanwhile what lies `ahead` bytes behind rows is brought near: behind those of x where
    they are listed, otherwise behind those whose 64 addresses stand at `near`.
    """
    loop = _Loop(name, listed, more, hint)

    @op(_void(*[_intp] * 9))
    def step(b: Builder, a: Value, lda: Value, x: Value, ldx: Value, n: Value, c: Value, ldc: Value, near: Value,
             ahead: Value) -> None:
        height, width = _FIT[targets.current().lowering]
        for r0 in range(0, rows, height):
            for v0 in range(0, vectors, width):
                tile = range(r0, min(rows, r0 + height)), range(v0, min(vectors, v0 + width))
                loop.emit(b, a, lda, x, ldx, n, c, ldc, near, ahead, *tile)
    return step


class _Loop:
    """One tile of results in registers over all k."""

    def __init__(self, name: str, listed: bool, more: bool, hint: bool):
        (self.lanes, self.widen), self.listed, self.more, self.hint = _READ[name], listed, more, hint

    def emit(self, b: Builder, a: Value, lda: Value, x: Value, ldx: Value, n: Value, c: Value, ldc: Value,
             near: Value, ahead: Value, rows: range, vectors: range) -> None:
        left = [b.add(a, b.mul(lda, I64(r))) for r in rows]
        out = [b.add(b.add(c, b.mul(ldc, I64(r))), I64(64 * v)) for r in rows for v in vectors]
        start = [b.load(pointer(b, place, _F), align=4) if self.more else const(_F, 0.0) for place in out]
        before, loop, done = b.block, b.append_basic_block("k"), b.append_basic_block("done")
        b.branch(loop)
        b.position_at_end(loop)
        k, offset, acc = b.phi(I64), b.phi(I64), [b.phi(_F) for _ in out]
        row = b.add(_entry(b, x, k), ldx) if self.listed else b.add(x, offset)
        total = self._sums(b, left, row, k, acc, vectors)
        if self.hint:
            self._hint(b, row, k, near, ahead, vectors)
        after = b.add(k, I64(1))
        steps = [(k, I64(0), after), (offset, I64(0), b.add(offset, ldx)), *zip(acc, start, total)]
        for phi, first, later in steps:
            phi.add_incoming(first, before)
            phi.add_incoming(later, loop)
        b.cbranch(b.icmp_signed("<", after, n), loop, done)
        b.position_at_end(done)
        for place, value in zip(out, total):
            b.store(value, pointer(b, place, _F), align=4)

    @property
    def _bytes(self) -> int:
        """Of one vector in memory."""
        return 32 if self.lanes is _WORDS else 64

    def _sums(self, b: Builder, left: list[Value], row: Value, k: Value, acc: list[Value], vectors: range
              ) -> list[Value]:
        xs = [self.widen(b, b.load(pointer(b, b.add(row, I64(self._bytes * v)), self.lanes), align=1)) for v in vectors]
        ys = [spread(b, b.load(b.gep(pointer(b, place, F32), [k]), align=4), 16) for place in left]
        return [simd.emit_fma(b, x, y, total) for (y, x), total in zip([(y, x) for y in ys for x in xs], acc)]

    def _hint(self, b: Builder, row: Value, k: Value, near: Value, ahead: Value, vectors: range) -> None:
        """As much of the rows ahead as this tile reads of its own; for columns, as much as gets all of them over k."""
        if self.listed:
            place, n = b.add(row, I64(self._bytes * vectors[0])), self._bytes * len(vectors)
        else:
            place, n = b.add(_entry(b, near, b.and_(k, I64(63))), b.shl(b.lshr(k, I64(6)), I64(7))), 128
        for i in range(0, n, 64):
            simd.emit_prefetch(b, b.add(b.add(place, ahead), I64(i)))


def _entry(b: Builder, table: Value, i: Value) -> Value:
    return b.load(b.gep(pointer(b, table, I64), [i]), align=8)


# Transpositions: first within the parts of 128 bits that registers are made of, by interleaving; then of whole parts.

def _zip(b: Builder, x: Value, y: Value, part: int) -> list[Value]:
    """Lanes of x and y in turn: those from the lower half of each part, those from the upper half."""
    n = x.type.count
    return [shuffle(b, x, [i for p in range(0, n, part) for lane in range(p + half, p + half + part // 2)
                           for i in (lane, n + lane)], y) for half in (0, part // 2)]


def _in_parts(b: Builder, rows: list[Value]) -> list[Value]:
    """As many rows as lanes in a part: part p of vector c of the result is lane c of part p of all rows."""
    n = len(rows)
    for _ in range(n.bit_length() - 1):
        rows = [x for i in range(n // 2) for x in _zip(b, rows[i], rows[i + n // 2], n)]
    return rows


def _parts(b: Builder, x: Value, y: Value, first: int, step: int) -> Value:
    """Two parts of x, then the same of y: the first one, and the one `step` after it. For step 1 in turn."""
    n, part = x.type.count, x.type.count // 4
    own = [(first * part + i, (first + step) * part + i) for i in range(part)]
    one, two = [i for i, _ in own], [i for _, i in own]
    both = [*one, *[n + i for i in one], *two, *[n + i for i in two]] if step == 1 else [
        *one, *two, *[n + i for i in one], *[n + i for i in two]]
    return shuffle(b, x, both, y)


@op(_void(_intp, _intp, *[f32x16] * 16))
def store_columns(b: Builder, address: Value, stride: Value, x0: Value, x1: Value, x2: Value, x3: Value, x4: Value,
                  x5: Value, x6: Value, x7: Value, x8: Value, x9: Value, x10: Value, x11: Value, x12: Value,
                  x13: Value, x14: Value, x15: Value) -> None:
    """Store 16 rows of 16 float32: number i of all of them as 16 in a row, at i times the stride."""
    rows = [x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15]
    fours = [_in_parts(b, rows[j:j + 4]) for j in range(0, 16, 4)]
    for c, q in enumerate(zip(*fours)):
        halves = [[_parts(b, q[i], q[i + 1], first, 2) for i in (0, 2)] for first in (0, 1)]
        for p in range(4):
            column = _parts(b, halves[p & 1][0], halves[p & 1][1], p >> 1, 2)
            b.store(column, pointer(b, b.add(address, b.mul(stride, I64(4 * p + c))), _F), align=4)


@op(_void(_intp, _intp, *[i8x64] * 16))
def store_words(b: Builder, address: Value, stride: Value, x0: Value, x1: Value, x2: Value, x3: Value, x4: Value,
                x5: Value, x6: Value, x7: Value, x8: Value, x9: Value, x10: Value, x11: Value, x12: Value, x13: Value,
                x14: Value, x15: Value) -> None:
    """As `store_columns`, 16 rows of 32 numbers of 16 bits."""
    rows = [b.bitcast(x, ir.VectorType(I16, 32)) for x in (x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13,
                                                           x14, x15)]
    for c, (x, y) in enumerate(zip(_in_parts(b, rows[:8]), _in_parts(b, rows[8:]))):
        for p in (0, 2):
            pair = _parts(b, x, y, p, 1)
            for half in (0, 1):
                column = shuffle(b, pair, list(range(16 * half, 16 * half + 16)))
                b.store(column, pointer(b, b.add(address, b.mul(stride, I64(8 * (p + half) + c))), _WORDS), align=2)
