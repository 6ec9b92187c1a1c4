"""Blocks of 16 rows of a recurrent state: steps of a recurrence on them, in registers. Written as `simd` is, with `vector.op`.

Comes in: addresses. Goes out: the block after one token, and what its 16 rows give. Must not know: heads, sequences, tensors.

A row has 16 n float32. Every sum over a row is one chain of fma per lane, then halves folded together as in `simd.hsum`.
"""
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from . import simd
from .vector import F32, I32, I64, Builder, Value, call, const, f32x16, op, pointer, shuffle, spread

_intp, _f32, _void = types.intp, types.float32, types.void
_F = f32x16.ir
ROWS = 16


def _load(b: Builder, address: Value, i: int = 0) -> Value:
    """Vector number i from there on."""
    return b.load(pointer(b, b.add(address, I64(64 * i)), _F), align=4)


def _store(b: Builder, x: Value, address: Value, i: int = 0) -> None:
    b.store(x, pointer(b, b.add(address, I64(64 * i)), _F), align=4)


def _vectors(b: Builder, address: Value, n: int) -> list[Value]:
    return [_load(b, address, i) for i in range(n)]


def _dot(b: Builder, xs: list[Value], ys: list[Value]) -> Value:
    """Lane by lane; not yet summed over lanes."""
    total = b.fmul(xs[0], ys[0])
    for x, y in zip(xs[1:], ys[1:]):
        total = simd.emit_fma(b, x, y, total)
    return total


def _sums(b: Builder, rows: list[Value]) -> Value:
    """Lane r: the sum of the lanes of rows[r]."""
    width = 16                                      # lanes that still belong to one row
    while len(rows) > 1:
        first = [start + i for start in range(0, 32, width) for i in range(width // 2)]
        halves = ((shuffle(b, x, first, y), shuffle(b, x, [i + width // 2 for i in first], y))
                  for x, y in zip(rows[::2], rows[1::2]))
        rows, width = [b.fadd(x, y) for x, y in halves], width // 2
    return rows[0]


def _lane(b: Builder, x: Value, r: int) -> Value:
    return shuffle(b, x, [r] * 16)


def delta_step(n: int, per_channel: bool) -> Any:
    """(old, new, q, k, v, decays, decay, beta, scale, out): the delta rule on rows S of `old`, for one token.

    S' = decay S + k (v - decay S k) beta; out = scale S' q. `v` and `out` are 16 numbers, one of each row; q and k have 16 n;
    the decay is one number in all lanes, or those of each channel stand at `decays`. `new` may be `old`.
    """
    @op(_void(*[_intp] * 6, f32x16, _f32, _f32, _intp))
    def step(b: Builder, old: Value, new: Value, q: Value, k: Value, v: Value, decays: Value, decay: Value, beta: Value,
             scale: Value, out: Value) -> None:
        qs, ks = _vectors(b, q, n), _vectors(b, k, n)
        ds = _vectors(b, decays, n) if per_channel else [decay] * n
        row = [b.add(old, I64(64 * n * r)) for r in range(ROWS)]
        seen_k, seen_q = [b.fmul(x, d) for x, d in zip(ks, ds)], [b.fmul(x, d) for x, d in zip(qs, ds)]
        sums = [(_dot(b, s, seen_k), _dot(b, s, seen_q)) for s in (_vectors(b, x, n) for x in row)]
        u, w = _sums(b, [x for x, _ in sums]), _sums(b, [y for _, y in sums])
        delta = b.fmul(b.fsub(_load(b, v), u), spread(b, beta, 16))
        both = spread(b, _total(b, _dot(b, qs, ks)), 16)
        _store(b, b.fmul(simd.emit_fma(b, delta, both, w), spread(b, scale, 16)), out)
        for r, x in enumerate(row):
            d = _lane(b, delta, r)
            for i in range(n):
                y = simd.emit_fma(b, _load(b, x, i), ds[i], b.fmul(d, ks[i]))
                _store(b, y, b.add(new, I64(64 * n * r)), i)
    return step


def _total(b: Builder, x: Value) -> Value:
    return simd._fold(b, x, b.fadd)


def scan_step(n: int) -> Any:
    """(old, new, b, c, x, decay, out): the selective scan on rows S of `old` that decay alike, for one token.

    S' = decay S + x b; out = S' c. x holds a number of each row, b and c at their addresses have 16 n. `new` may be `old`.
    """
    @op(_void(*[_intp] * 4, f32x16, f32x16, _intp))
    def step(b: Builder, old: Value, new: Value, b_: Value, c: Value, x: Value, decay: Value, out: Value) -> None:
        bs, cs = _vectors(b, b_, n), _vectors(b, c, n)
        totals = []
        for r in range(ROWS):
            start, amount = I64(64 * n * r), _lane(b, x, r)
            after = [simd.emit_fma(b, s, decay, b.fmul(amount, y)) for s, y in zip(_vectors(b, b.add(old, start), n), bs)]
            for i, y in enumerate(after):
                _store(b, y, b.add(new, start), i)
            totals.append(_dot(b, after, cs))
        _store(b, _sums(b, totals), out)
    return step


def correct_step(n: int) -> Any:
    """(old, new, r, w, k, v, a, b, out): the step of RWKV 7 on rows S of `old`, for one token.

    S' = w S + v k + (S a) b; out = S' r. `v` and `out` are 16 numbers, one of each row; the others have 16 n. `new` may be `old`.
    """
    @op(_void(*[_intp] * 9))
    def step(b: Builder, old: Value, new: Value, r: Value, w: Value, k: Value, v: Value, a: Value, b_: Value, out: Value) -> None:
        rs, ws, ks, against, along = (_vectors(b, x, n) for x in (r, w, k, a, b_))
        row = [b.add(old, I64(64 * n * i)) for i in range(ROWS)]
        seen = [b.fmul(x, y) for x, y in zip(ws, rs)]
        sums = [(_dot(b, s, against), _dot(b, s, seen)) for s in (_vectors(b, x, n) for x in row)]
        u, y = _sums(b, [x for x, _ in sums]), _sums(b, [x for _, x in sums])
        values = _load(b, v)
        both = [spread(b, _total(b, _dot(b, x, rs)), 16) for x in (ks, along)]
        _store(b, simd.emit_fma(b, u, both[1], simd.emit_fma(b, values, both[0], y)), out)
        for i, x in enumerate(row):
            amount, correction = _lane(b, values, i), _lane(b, u, i)
            for j in range(n):
                new_part = simd.emit_fma(b, correction, along[j], b.fmul(amount, ks[j]))
                _store(b, simd.emit_fma(b, _load(b, x, j), ws[j], new_part), b.add(new, I64(64 * n * i)), j)
    return step


def taps(m: int, i: int) -> Any:
    """f(address): number i of each m in a row, for 16 runs of m float32; zeros for i < 0."""
    wide = ir.VectorType(F32, 16 * m)

    @op(f32x16(_intp))
    def f(b: Builder, address: Value) -> Value:
        if i < 0:
            return const(_F, 0.0)
        return shuffle(b, b.load(pointer(b, address, wide), align=4), list(range(i, 16 * m, m)))
    return f


def store_taps(m: int) -> Any:
    """f(address, x0, x1, x2): the way back, of the last m of the three vectors."""
    @op(_void(_intp, f32x16, f32x16, f32x16))
    def f(b: Builder, address: Value, x0: Value, x1: Value, x2: Value) -> None:
        xs = [x0, x1, x2][3 - m:]
        joined = simd._join(b, [*xs, *[ir.Constant(_F, ir.Undefined)] * ((1 << (m - 1).bit_length()) - m)])
        lanes = [16 * (j % m) + j // m for j in range(16 * m)]
        b.store(shuffle(b, joined, lanes), pointer(b, address, ir.VectorType(F32, 16 * m)), align=4)
    return f



@op(_void(_intp, _intp, f32x16, _intp))
def store_lanes(b: Builder, address: Value, stride: Value, x: Value, n: Value) -> None:
    """The first n lanes, each `stride` bytes after the one before."""
    lanes = ir.Constant(ir.VectorType(I64, 16), list(range(16)))
    places = b.add(spread(b, address, 16), b.mul(lanes, spread(b, stride, 16)))
    pointers = b.inttoptr(places, ir.VectorType(ir.PointerType(F32), 16))
    call(b, "llvm.masked.scatter.v16f32.v16p0", ir.VoidType(), x, pointers, I32(4), b.icmp_signed("<", lanes, spread(b, n, 16)))
