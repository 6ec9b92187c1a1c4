"""The inner step of products with many columns: 32 k of weights, unpacked in memory, times a few columns.

Comes in: addresses of unpacked blocks of one panel or more and of a block of activations. Goes out: accumulators of 16 rows for
each panel and column. Must not know: types of weights, loops. Written as `simd` is, with `vector.op`.

An unpacked block holds the codes of 4 k x 16 rows in 8 vectors, as `tile` takes them, and its scales. All panels share what is
read of the activations. With 8 columns and panels and two sums for each, 16 chains of products are in flight, twice what hides the
latency of one; the accumulators leave just enough registers for them.
"""
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from . import simd
from .tile import BLOCK, VALUES, Rule, scaled, start, totals
from .vector import I8, I32, I64, Builder, Value, at, const, f32x16, i8x64, i32x16, op, pointer, spread

_intp, _void = types.intp, types.void
CODES = 8 * 64                                      # bytes of the codes of a block; 64 for each scale follow


def area(nbytes: int) -> Any:
    """() -> address of `nbytes` on the thread's stack, whole cache lines."""
    @op(_intp())
    def address(b: Builder) -> Value:
        with b.goto_entry_block():
            memory = b.alloca(ir.ArrayType(I8, nbytes))
            memory.align = 64
        return b.ptrtoint(memory, I64)
    return address


def _vectors(lanes: Any, n: int) -> tuple[Any, Any]:
    many = types.UniTuple(lanes, n)

    @op(many(_intp))
    def load(b: Builder, address: Value) -> Value:
        out = ir.Constant(ir.ArrayType(lanes.ir, n), ir.Undefined)
        for i in range(n):
            out = b.insert_value(out, _vector(b, address, 64 * i, lanes), i)
        return out

    @op(_void(_intp, many))
    def store(b: Builder, address: Value, x: Value) -> None:
        for i in range(n):
            b.store(b.extract_value(x, i), pointer(b, at(b, address, 64 * i), lanes.ir), align=64)
    return load, store


def _vector(b: Builder, address: Value, offset: int, lanes: Any) -> Value:
    return b.load(pointer(b, at(b, address, offset), lanes.ir), align=64)


def floats(n: int) -> tuple[Any, Any]:
    """(address) -> n f32x16 and (address, n f32x16): whole cache lines."""
    return _vectors(f32x16, n)


def put_codes() -> Any:
    """(address, codes): the codes of a block."""
    return _vectors(i8x64, 8)[1]


def multiply(n_columns: int, n_panels: int, panel_bytes: int, rule: Rule) -> Any:
    """(accumulators of each column for each panel, block, act) -> accumulators. The next panel's block is `panel_bytes` further."""
    cells = [(p, t) for p in range(n_panels) for t in range(n_columns)]
    sums = types.UniTuple(f32x16, len(cells))

    @op(sums(sums, _intp, _intp))
    def step(b: Builder, acc: Value, block: Value, act: Value) -> Value:
        panels = [at(b, block, panel_bytes * p) for p in range(n_panels)]
        columns = [at(b, act, BLOCK * t) for t in range(n_columns)]
        sums = [totals(b, column, rule) for column in columns]
        dots = _dots(b, panels, columns, [[start(b, x, rule) for x in column] for column in sums], rule)
        scales = [[_vector(b, panel, CODES + 64 * i, f32x16) for i in range(rule.n_scales)] for panel in panels]
        for i, (p, t) in enumerate(cells):
            x = scaled(b, b.extract_value(acc, i), dots[p][t], sums[t], scales[p], columns[t], rule)
            acc = b.insert_value(acc, x, i)
        return acc
    return step


def _dots(b: Builder, panels: list[Value], columns: list[Value], starts: list[list[Value]], rule: Rule
          ) -> list[list[list[Value]]]:
    """[panel][column][scale]: products of the first and of the last 16 k, or their sum where one scale holds for both."""
    zero = const(i32x16.ir, 0)
    dots = [[(column + [zero])[:2] for column in starts] for _ in panels]
    for g in range(8) if rule.wide == 16 else (0, 4, 1, 5, 2, 6, 3, 7):
        codes = [_vector(b, panel, 64 * g, i8x64) for panel in panels]
        for t, column in enumerate(columns):
            four = b.load(pointer(b, at(b, column, VALUES + 4 * g), I32), align=4)
            x = b.bitcast(spread(b, four, 16), i8x64.ir)
            for panel, w in zip(dots, codes):
                panel[t][g // 4] = simd.emit_dot4(b, panel[t][g // 4], w, x, rule.small)
    return dots if rule.wide == 16 else [[[b.add(*halves)] for halves in panel] for panel in dots]
