"""Matrix products of panels and activation tiles: one template for all types and all numbers of columns.

Comes in: panels (`repack`), tiles (`activation`), addresses in parameter blocks. Goes out: f32 [n_rows, n_tokens].
Must not know: tensors' meaning, plans.

A thread takes a share of the panels. For each panel it goes through the tiles: the weights of a block are unpacked
into registers once and used for all columns of a tile. Columns are taken in batches that stay in the L2 cache.
Where registers suffice two panels share what is read of the activations: of plain types always, of quantized ones with many
columns (`matmul_many`).
Each output is one chain of sums over k, in the order of k, whatever the tile, the batch or the number of threads: the same
bits for a token alone and among others.
"""
from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ggraph import dtypes
from ggraph.dtypes import DType

from . import activation, matmul_many, targets
from .activation import BLOCK
from .formats import FORMATS, GET, Format
from .kernel import Kernel, inline, simd, template, tile
from .layout import COLUMNS, share
from .repack import PLAIN, ROWS, block, panel_bytes, supports

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

__all__ = ["matmul_kernel", "panel_bytes", "supports"]

SUMS_F16 = (dtypes.Q4_1, dtypes.Q5_1)               # their offsets meet sums in f16, as in llama.cpp's q8_1
L2 = 512 << 10                                      # bytes of activations that are kept hot
AHEAD = 8192                                        # weights are asked for so many bytes before they are needed


def matmul_kernel(dtype: DType) -> Kernel:
    """Parameters: dst, 9 words, f32 [n_rows, n, ..] with one distance between tokens | address of the activation tiles
    | address of the panels | k | how it is cut (`join`). n_tokens is the product of dst's outer axes."""
    return _matmul(dtype.name, activation.width())


@template
def _matmul(name: str, width: int) -> Callable[..., None]:
    run = product(dtypes.TYPES[name], width)

    def matmul(p, ith, nth):
        n = simd.word(p, 2) * simd.word(p, 3) * simd.word(p, 4)
        run(simd.word(p, 10), simd.word(p, 9), n, simd.word(p, 11), simd.word(p, 0), simd.word(p, 6), simd.word(p, 1),
            0, 2 if simd.word(p, 12) == COLUMNS else 1, ith, nth)
    return matmul


def sizes(dtype: DType) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Functions of k: bytes of one column of activations, and of one panel."""
    form, (length, size) = activation.form(dtype), block(dtype)
    unit, unit_bytes = form.length, form.nbytes

    @inline
    def column_bytes(k):
        return (k + unit - 1) // unit * unit_bytes

    @inline
    def panel_size(k):
        return (k + length - 1) // length * size
    return column_bytes, panel_size


def product(dtype: DType, width: int, scattered: bool = False) -> Callable[..., None]:
    """(panels, tiles, n columns, k, dst, stride, n_rows, order, unit, ith, nth): a thread's share of the product of a
    matrix and n columns; panels are shared out `unit` at a time. Column i of the result goes to dst + stride * i, if
    `scattered` to dst + stride * order[i] (i32)."""
    column_bytes, panel_size = sizes(dtype)
    all_panels = (_plain if dtype in PLAIN else _quantized)(dtype, width, scattered, panel_size)
    least = sys.maxsize if dtype in PLAIN else _least()

    @inline
    def run(weights, act, n, k, dst, stride, n_rows, order, unit, ith, nth):
        column, panels = column_bytes(k), (n_rows + ROWS - 1) // ROWS
        begin, end = share((panels + unit - 1) // unit, ith, nth)
        batch = matmul_many.MOST if n >= least else max(L2 // column // width, 1) * width
        for first in range(0, n, batch):
            last = min(n, first + batch)
            all_panels(weights, begin * unit, min(end * unit, panels), act, column, first, last, k, dst, stride, n_rows, order)
            if simd.aborted():
                return
    return run


def _plain(dtype: DType, width: int, scattered: bool, panel_size: Callable[..., Any]) -> Callable[..., None]:
    """(panels, begin, end, tiles, bytes per column, first, last, k, dst, stride, n_rows, order): the panels begin to end times the
    columns first to last."""
    group = 2 if _many_registers() else 1
    together, panel = tiles(dtype, width, scattered, group), tiles(dtype, width, scattered, 1) if group > 1 else _nothing

    @inline
    def panels(weights, i, end, act, column, first, last, k, dst, stride, n_rows, order):
        size = panel_size(k)
        while i + group <= end:
            together(weights + i * size, act, column, first, last, k, dst + 4 * ROWS * i, stride, n_rows - ROWS * i, order)
            i += group
        if i < end:
            panel(weights + i * size, act, column, first, last, k, dst + 4 * ROWS * i, stride, n_rows - ROWS * i, order)
    return panels


def _quantized(dtype: DType, width: int, scattered: bool, panel_size: Callable[..., Any]) -> Callable[..., None]:
    """The same: pairs of panels times whole tiles first, if there are many, then what is left of columns and panels."""
    fmt, panel = FORMATS[dtype], tiles(dtype, width, scattered, 1)
    least, many = _least(), _no_pairs
    if _many_registers():
        many = matmul_many.product(fmt, _codes(fmt), _rule(dtype), panel_size, width, scattered)

    @inline
    def panels(weights, begin, end, act, column, first, last, k, dst, stride, n_rows, order):
        size, i, rest = panel_size(k), begin, first
        if last - first >= least:
            while i + 2 <= end:
                pairs, to = min((end - i) // 2, matmul_many.PAIRS), dst + 4 * ROWS * i
                rest = many(weights + i * size, pairs, act, column, first, last, k, to, stride, n_rows - ROWS * i, order)
                i += 2 * pairs
        for j in range(begin, end):
            panel(weights + j * size, act, column, rest if j < i else first, last, k, dst + 4 * ROWS * j, stride,
                  n_rows - ROWS * j, order)
    return panels


def _many_registers() -> bool:
    return targets.current().lowering == "avx512vnni"


def _least() -> int:
    """Columns from which on quantized weights are unpacked first."""
    return matmul_many.LEAST if _many_registers() else sys.maxsize


def _rule(dtype: DType) -> Any:
    fmt = FORMATS[dtype]
    return tile.Rule(fmt.wide, fmt.bias, fmt.mins, fmt.small, dtype in SUMS_F16)


@inline
def _no_pairs(w, pairs, act, column, t, last, k, dst, stride, rows, order):
    return t


@inline
def _nothing(w, act, column, t, last, k, dst, stride, rows, order):
    return t


def tiles(dtype: DType, width: int, scattered: bool, n_panels: int) -> Callable[..., None]:
    """(panel, tiles, bytes per column, first, last, k, dst, stride, rows, order): one panel, or two, times the columns first to
    last, in tiles of `width`, and what is left in narrower ones."""
    one = _plain_tile(dtype, width, n_panels) if dtype in PLAIN else _tile(dtype, width)
    store = tile.store(width, scattered, n_panels)

    @inline
    def wide(w, act, column, t, last, k, dst, stride, rows, order):
        while last - t >= width:
            store(dst, stride, one(w, act + t * column, k), rows, t, order)
            t += width
        return t
    if width == 1:
        return wide
    narrow = tiles(dtype, width // 2, scattered, n_panels)

    @inline
    def all_widths(w, act, column, t, last, k, dst, stride, rows, order):
        t = wide(w, act, column, t, last, k, dst, stride, rows, order)
        return narrow(w, act, column, t, last, k, dst, stride, rows, order)
    return all_widths


def _tile(dtype: DType, width: int) -> Callable[..., Any]:
    """(panel, tile, k) -> sums of 16 rows for each column."""
    fmt = FORMATS[dtype]
    zeros = tile.zeros(width)
    columns = tile.columns(width, _rule(dtype))
    codes, scales = _codes(fmt), fmt.scales
    block, n_blocks, head, values, step = dtype.block, fmt.blocks, fmt.head_bytes, fmt.values, BLOCK * width
    size = fmt.nbytes // n_blocks

    @inline
    def one(w, act, k):
        acc = zeros()
        for _ in range(k // block):
            v = w + head
            for i in range(n_blocks):
                for j in range(0, size, 64):
                    simd.prefetch_near(w + i * size + AHEAD + j)
                acc = columns(acc, codes(v), scales(w, i), act)
                v += values
                act += step
            w = v
        return acc
    return one


def _codes(fmt: Format) -> Callable[..., Any]:
    """Address of the values -> 8 vectors of codes."""
    get = GET[fmt.bits]
    if fmt.table is None:
        return get
    table = simd.table(*fmt.table, *[0] * (16 - len(fmt.table)))

    @inline
    def looked_up(v):
        (a, b, c, d, e, f, g, h), t = get(v), table()
        return (simd.lookup(t, a), simd.lookup(t, b), simd.lookup(t, c), simd.lookup(t, d),
                simd.lookup(t, e), simd.lookup(t, f), simd.lookup(t, g), simd.lookup(t, h))
    return looked_up


def _plain_tile(dtype: DType, width: int, n_panels: int) -> Callable[..., Any]:
    """The same for F32, F16 and BF16, of one panel or of two side by side."""
    pairs = dtype is dtypes.BF16
    zeros, outer = tile.zeros(n_panels * width), tile.outer(width, n_panels, pairs)
    load = {dtypes.F32: simd.load_f32, dtypes.F16: simd.load_f16, dtypes.BF16: simd.load_i32}[dtype]
    (length, size), step = block(dtype), 4 * width

    @inline
    def one(w, act, k):
        acc, n = zeros(), (k + length - 1) // length
        for _ in range(n):
            simd.prefetch_near(w + AHEAD)
            acc = outer(acc, (load(w),), act)
            w += size
            act += step
        return acc

    @inline
    def two(w, act, k):
        acc, n = zeros(), (k + length - 1) // length
        other = w + n * size
        for _ in range(n):
            simd.prefetch_near(w + AHEAD)
            simd.prefetch_near(other + AHEAD)
            acc = outer(acc, (load(w), load(other)), act)
            w += size
            other += size
            act += step
        return acc
    return one if n_panels == 1 else two
