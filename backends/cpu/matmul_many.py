"""Products of quantized weights with many columns: two panels are unpacked into the first-level cache and meet all columns there.

Comes in: addresses of panels and tiles, as in `matmul`. Goes out: whole tiles of columns; what is left of them is for `matmul`.
Must not know: types of weights, how panels are shared out.

A part of k at a time, so that the unpacked weights stay in the first-level cache. In between the sums of two panels for all
columns lie in the second.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .activation import BLOCK
from .formats import Format
from .kernel import inline, stage, tile

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

LEAST = 32                                          # columns for which unpacking first is faster
MOST = 256                                          # columns in one call
_DEPTH, _AT_MOST = 512, 768                         # k unpacked at a time
_COLUMNS, _PANELS = 4, 2                            # what the registers hold


def product(fmt: Format, codes: Callable[..., Any], rule: Any, panel_size: Callable[..., Any], width: int, scattered: bool
            ) -> Callable[..., Any]:
    """(two panels, tiles, bytes per column, first, last, k, dst, stride, rows, order) -> the first column that is left."""
    block_bytes = stage.CODES + 64 * rule.n_scales
    panel_bytes, sums_bytes = block_bytes * _AT_MOST // 32, 64 * _PANELS * _COLUMNS
    unpacked, sums = stage.area(_PANELS * panel_bytes), stage.area(sums_bytes * MOST // _COLUMNS)
    unpack = _unpack(fmt, codes, rule.n_scales, block_bytes)
    multiply = stage.multiply(_COLUMNS, _PANELS, panel_bytes, rule)
    (load, save), zeros = stage.floats(_PANELS * _COLUMNS), tile.zeros(_PANELS * _COLUMNS)
    store, length, nbytes = tile.store(_COLUMNS, scattered, _PANELS), fmt.dtype.block, fmt.nbytes

    @inline
    def columns(acc, w, act, n):
        for _ in range(n):
            acc = multiply(acc, w, act)
            w += block_bytes
            act += BLOCK * width
        return acc

    @inline
    def many(w, act, column, first, last, k, dst, stride, rows, order):
        at, last = unpacked(), last - (last - first) % width
        parts = max((k + _AT_MOST - _DEPTH) // _DEPTH, 1)
        depth = ((k + parts - 1) // parts + length - 1) // length * length
        for begin in range(0, k, depth):
            n = min(depth, k - begin)
            for p in range(_PANELS):
                unpack(w + p * panel_size(k) + begin // length * nbytes, at + p * panel_bytes, n // length)
            partial = sums()
            for t in range(first, last, _COLUMNS):
                x = act + t // width * width * column + (begin // 32 * width + t % width) * BLOCK
                acc = columns(zeros() if begin == 0 else load(partial), at, x, n // 32)
                if begin + n == k:
                    store(dst, stride, acc, rows, t, order)
                else:
                    save(partial, acc)
                partial += sums_bytes
        return last
    return many


def _unpack(fmt: Format, codes: Callable[..., Any], n_scales: int, block_bytes: int) -> Callable[..., None]:
    """(superblock, to, n): n superblocks of a panel."""
    put_codes, (_, put_scales), scales = stage.put_codes(), stage.floats(n_scales), fmt.scales
    head, values, n_blocks, code_bytes = fmt.head_bytes, fmt.values, fmt.blocks, stage.CODES

    @inline
    def unpack(w, to, n):
        for _ in range(n):
            v = w + head
            for i in range(n_blocks):
                put_codes(to, codes(v))
                put_scales(to + code_bytes, scales(w, i))
                v += values
                to += block_bytes
            w = v
    return unpack
