"""Products of quantized weights with many columns: two panels are unpacked into the first-level cache and meet all columns there.

Comes in: addresses of panels and tiles, as in `matmul`. Goes out: whole tiles of columns; what is left of them is for `matmul`.
Must not know: types of weights, how panels are shared out.

A part of k at a time, so that the unpacked weights stay in the first-level cache; in the second lie the activations of this
part, which two pairs of panels use in turn, and the sums of both for all columns. Meanwhile the next weights are asked for:
nothing is multiplied while they are unpacked.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .activation import BLOCK
from .formats import Format
from .kernel import inline, simd, stage, tile

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

LEAST = 32                                          # columns for which unpacking first is faster
MOST = 256                                          # columns in one call
_DEPTH, _AT_MOST = 512, 768                         # k unpacked at a time
PAIRS = 2                                           # that one call takes
_COLUMNS, _PANELS = 4, 2                            # what the registers hold


def product(fmt: Format, codes: Callable[..., Any], rule: Any, panel_size: Callable[..., Any], width: int, scattered: bool
            ) -> Callable[..., Any]:
    """(panels, pairs of them, tiles, bytes per column, first, last, k, dst, stride, rows, order) -> the first column left over."""
    block_bytes = stage.CODES + 64 * rule.n_scales
    panel_bytes, sums_bytes = block_bytes * _AT_MOST // 32, 64 * _PANELS * _COLUMNS
    pair_bytes = sums_bytes * MOST // _COLUMNS
    unpacked, sums = stage.area(_PANELS * panel_bytes), stage.area(PAIRS * pair_bytes)
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
    def ask_for(at, size, nbytes):
        for p in range(_PANELS):
            for line in range(0, nbytes, 64):
                simd.prefetch(at + p * size + line)

    @inline
    def next_part(w, here, pair, pairs, size, after):
        """What is unpacked next: of the next pair, or of the first one behind this part of k, or of the pairs behind all."""
        if pair + 1 < pairs:
            return here + _PANELS * size
        return w + (after if after else _PANELS * pairs * size)

    @inline
    def many(w, pairs, act, column, first, last, k, dst, stride, rows, order):
        at, last, size = unpacked(), last - (last - first) % width, panel_size(k)
        parts = max((k + _AT_MOST - _DEPTH) // _DEPTH, 1)
        depth = ((k + parts - 1) // parts + length - 1) // length * length
        for begin in range(0, k, depth):
            n = min(depth, k - begin)
            for pair in range(pairs):
                here = w + _PANELS * pair * size + begin // length * nbytes
                for p in range(_PANELS):
                    unpack(here + p * size, at + p * panel_bytes, n // length)
                soon = next_part(w, here, pair, pairs, size, (begin + n) % k // length * nbytes)
                step = (n // length * nbytes * _COLUMNS // (last - first) + 63) // 64 * 64
                partial = sums() + pair * pair_bytes
                for t in range(first, last, _COLUMNS):
                    ask_for(soon, size, step)
                    soon += step
                    x = act + t // width * width * column + (begin // 32 * width + t % width) * BLOCK
                    acc = columns(zeros() if begin == 0 else load(partial), at, x, n // 32)
                    if begin + n == k:
                        store(dst + _PANELS * pair * 64, stride, acc, rows - _PANELS * pair * 16, t, order)
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
