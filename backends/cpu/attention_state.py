"""States: what is known of a row of the result when some of its keys have been seen.

Comes in: addresses of states. Goes out: states cleared, merged, turned into rows. Must not know: keys, chunks.

A state is, in float32: [dv rounded up to 16] sums of values | 16 times the top, the largest score | the lanes' sums of
weights, e^(score - top). A top of -inf: nothing was seen yet, and the sums mean nothing.
"""
from __future__ import annotations

import numpy as np

from . import simd, vmath
from .attention_block import OUT, SINKS, Q, V
from .kernel import inline
from .layout import address, nb, ne

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

NEVER = -np.inf


@inline
def width(p):
    """Bytes of the sums of values."""
    return 4 * (ne(p, V, 0) + 15 & -16)


@inline
def size(p):
    return width(p) + 128


@inline
def clear(p, states, rows):
    for at in range(states, states + rows * size(p), size(p)):
        for i in range(0, size(p), 64):
            simd.store_f32(at + i, simd.splat_f32(0.0))
        simd.store_f32(at + width(p), simd.splat_f32(NEVER))


@inline
def _blend(state, part, old, new):
    simd.store_f32(state, simd.fma(simd.load_f32(part), new, simd.load_f32(state) * old))


@inline
def merge(p, states, parts, rows):
    """Take the states of a later chunk in."""
    end = width(p)
    for r in range(rows):
        state, part = states + r * size(p), parts + r * size(p)
        top, other = simd.load_f32(state + end), simd.load_f32(part + end)
        if simd.get_f32(part + end) != NEVER:
            one, shrink = simd.splat_f32(1.0), vmath.exp(-simd.absolute(top - other))
            old, new = simd.select(other > top, shrink, one), simd.select(other > top, one, shrink)
            for i in range(0, end, 64):
                _blend(state + i, part + i, old, new)
            simd.store_f32(state + end, simd.maximum(other, top))
            _blend(state + end + 64, part + end + 64, old, new)


@inline
def finish(p, state, t, head):
    """Write one row: sums of values over the sum of weights, or 0 where nothing was seen."""
    n, dv, end = ne(p, Q, 1), ne(p, V, 0), width(p)
    top, total = simd.load_f32(state + end), simd.splat_f32(simd.hsum(simd.load_f32(state + end + 64)))
    factor = simd.splat_f32(1.0)
    if address(p, SINKS) != 0:
        sink = simd.splat_f32(simd.get_f32(address(p, SINKS) + 4 * head))
        most = simd.maximum(sink, top)
        factor = vmath.exp(top - most)
        total = simd.fma(total, factor, vmath.exp(sink - most))
    factor = simd.select(total == 0.0, simd.splat_f32(0.0), factor / total)
    stream = t // n
    out = address(p, OUT) + head * nb(p, OUT, 1) + (t - stream * n) * nb(p, OUT, 2) + stream * nb(p, OUT, 3)
    for i in range(0, dv, 16):
        simd.store_f32_n(out + 4 * i, simd.load_f32(state + 4 * i) * factor, dv - i)
