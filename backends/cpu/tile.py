"""The inner step of every matrix product: one block of weights, in registers, times T activation columns.

Comes in: unpacked weights of 16 rows and an address of T activation blocks side by side. Goes out: T accumulators of
16 rows. Must not know: types of weights, how they are packed, loops. Written as `simd` is, with `vector.op`.

An activation block holds 32 values of one column: f32 d | f32 d*sum | i32 sum | i32 sum of the first 16 | 32 x int8.
"""
from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types

from . import simd, targets
from .vector import F32, I32, I64, Builder, Value, at, call, const, f32x16, i8x64, i32x16, op, pointer, spread

D, DSUM, SUM, SUM0, VALUES, BLOCK = 0, 4, 8, 12, 16, 48
_intp, _void = types.intp, types.void
_I, _F = i32x16.ir, f32x16.ir
_CODES = types.UniTuple(i8x64, 8)


def _tuple(ty: Any, n: int) -> Any:
    return types.UniTuple(ty, n)


def _unpack(b: Builder, values: Value) -> list[Value]:
    return [b.extract_value(values, i) for i in range(values.type.count)]


def _pack(b: Builder, values: list[Value]) -> Value:
    out = ir.Constant(ir.ArrayType(values[0].type, len(values)), ir.Undefined)
    for i, x in enumerate(values):
        out = b.insert_value(out, x, i)
    return out


def _spread(b: Builder, address: Value, offset: int, ty: Any) -> Value:
    return spread(b, b.load(pointer(b, at(b, address, offset), ty), align=4), 16)


def zeros(n: int) -> Any:
    """() -> n accumulators."""
    @op(_tuple(f32x16, n)())
    def zero(b: Builder) -> Value:
        return _pack(b, [const(_F, 0.0)] * n)
    return zero


def store(n: int, scattered: bool = False, n_panels: int = 1) -> Any:
    """(address, stride, accumulators, rows, first, order): 16 rows of each column of each panel, or as many as there are, at
    address + stride * (first + t), or if `scattered` * order[first + t]."""
    @op(_void(_intp, _intp, _tuple(f32x16, n_panels * n), _intp, _intp, _intp))
    def put(b: Builder, address: Value, stride: Value, acc: Value, rows: Value, first: Value, order: Value) -> None:
        for i, x in enumerate(_unpack(b, acc)):
            panel, t = divmod(i, n)
            if t == 0:
                lanes = ir.Constant(_I, list(range(16 * panel, 16 * panel + 16)))
                mask = b.icmp_signed("<", lanes, spread(b, b.trunc(rows, I32), 16))
            column = b.add(first, I64(t))
            if scattered:
                column = b.sext(b.load(b.gep(pointer(b, order, I32), [column]), align=4), I64)
            where = pointer(b, b.add(at(b, address, 64 * panel), b.mul(stride, column)), _F)
            call(b, "llvm.masked.store.v16f32.p0", ir.VoidType(), x, where, I32(4), mask)
    return put


def _dots(b: Builder, acc: Value, codes: list[Value], act: Value, groups: range, small: bool) -> Value:
    """acc + the products of some groups of 4 k. Two chains, since each step waits for the one before."""
    chains = [acc, const(_I, 0)]
    for g in groups:
        x = b.bitcast(_spread(b, act, VALUES + 4 * g, I32), i8x64.ir)
        chains[g & 1] = simd.emit_dot4(b, chains[g & 1], codes[g], x, small)
    return b.add(*chains)


class Rule(NamedTuple):
    """How 32 k of a type are multiplied: codes c stand for c - bias, `small`: none is above 127. One scale holds for `wide` k,
    16 or 32; with `mins` as many offsets follow; `rounded`: offsets are multiplied with the activations' sum as f16 has it."""
    wide: int
    bias: int
    mins: bool
    small: bool
    rounded: bool

    @property
    def n_scales(self) -> int:
        return 32 // self.wide * (2 if self.mins else 1)


def columns(n: int, rule: Rule) -> Any:
    """(accumulators, codes, scales, act) -> accumulators, for one block of 32 k and n columns.

    codes: 8 groups of 4 k x 16 rows, unsigned. scales: f32x16 with a value per row, scales and then offsets."""
    @op(_tuple(f32x16, n)(_tuple(f32x16, n), _CODES, _tuple(f32x16, rule.n_scales), _intp))
    def step(b: Builder, acc: Value, codes: Value, scales: Value, act: Value) -> Value:
        codes, scales = _unpack(b, codes), _unpack(b, scales)
        return _pack(b, [_column(b, x, codes, scales, at(b, act, BLOCK * t), rule) for t, x in enumerate(_unpack(b, acc))])
    return step


def _column(b: Builder, acc: Value, codes: list[Value], scales: list[Value], act: Value, rule: Rule) -> Value:
    sums, step = totals(b, act, rule), rule.wide // 4
    dots = [_dots(b, start(b, x, rule), codes, act, range(step * i, step * (i + 1)), rule.small) for i, x in enumerate(sums)]
    return scaled(b, acc, dots, sums, scales, act, rule)


def totals(b: Builder, act: Value, rule: Rule) -> list[Value]:
    """Sums of the activations that meet each scale."""
    total = _spread(b, act, SUM, I32)
    if rule.wide == 32:
        return [total]
    sum0 = _spread(b, act, SUM0, I32)
    return [sum0, b.sub(total, sum0)]


def start(b: Builder, total: Value, rule: Rule) -> Value:
    """What the products start from, so that codes c stand for c - bias. Exact."""
    return b.mul(total, const(_I, -rule.bias)) if rule.bias else const(_I, 0)


def scaled(b: Builder, acc: Value, dots: list[Value], sums: list[Value], scales: list[Value], act: Value, rule: Rule) -> Value:
    """acc + what the products of a block, one vector per scale, stand for."""
    d, (first, *others) = _spread(b, act, D, F32), [b.sitofp(x, _F) for x in dots]
    if rule.rounded or len(scales) == 1:
        acc = simd.emit_fma(b, first, b.fmul(scales[0], d), acc)
        return simd.emit_fma(b, scales[1], _spread(b, act, DSUM, F32), acc) if rule.rounded else acc
    product, terms = b.fmul(first, scales[0]), others + ([b.sitofp(x, _F) for x in sums] if rule.mins else [])
    for x, scale in zip(terms, scales[1:]):
        product = simd.emit_fma(b, scale, x, product)
    return simd.emit_fma(b, product, d, acc)


class _BFloat(ir.Type):
    """LLVM's type, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"


_BF16_PAIRS = ir.VectorType(_BFloat(), 32)


def _dot2(b: Builder, acc: Value, w: Value, x: Value) -> Value:
    """acc + the products of the two bf16 in each lane of w and x, i32x16. Where the machine has the instruction, it may take
    what is below 2^-126 as zero."""
    if targets.current().has("avx512bf16"):
        pairs = (b.bitcast(v, _BF16_PAIRS) for v in (w, x))
        return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", acc.type, acc, *pairs)
    upper, bits = const(w.type, -65536), const(w.type, 16)
    for part in (lambda v: b.shl(v, bits), lambda v: b.and_(v, upper)):
        y, z = (b.bitcast(part(v), acc.type) for v in (w, x))
        acc = simd.emit_fma(b, y, z, acc)
    return acc


def outer(n: int, n_panels: int, pairs: bool) -> Any:
    """(accumulators of n columns of each panel, weights of each panel, act) -> accumulators: one k of 16 rows, f32x16, times
    f32 columns; or of `pairs` two k of bf16, i32x16."""
    kind, lane, multiply = (i32x16, I32, _dot2) if pairs else (f32x16, F32, _fma)

    @op(_tuple(f32x16, n_panels * n)(_tuple(f32x16, n_panels * n), _tuple(kind, n_panels), _intp))
    def step(b: Builder, acc: Value, w: Value, act: Value) -> Value:
        columns, weights = [_spread(b, act, 4 * t, lane) for t in range(n)], _unpack(b, w)
        return _pack(b, [multiply(b, x, weights[i // n], columns[i % n]) for i, x in enumerate(_unpack(b, acc))])
    return step


def _fma(b: Builder, acc: Value, x: Value, y: Value) -> Value:
    return simd.emit_fma(b, x, y, acc)
