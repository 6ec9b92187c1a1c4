"""soft_max: softmax over rows, with mask, ALiBi and sinks.

Comes in: soft_max nodes with F32 rows. Goes out: one step. A row is one thread's, lanes are summed in the order of the
row and then as `simd.hsum` does; masked elements add exact zeros, so padding changes no bit.
"""
from __future__ import annotations

import numpy as np

from ggraph.dtypes import F16, F32
from ggraph.tensor import Tensor

from ..ref.rows import alibi_slopes
from .kernel import inline, simd, template, vmath
from .layout import address, f32_rows, in_rows, n_rows, ne, row, share, unravel
from .lower import Emit, Field, lowers

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

OUT, X, MASK, SINKS = range(4)
SCALE, ALIBI, SLOPES = range(36, 39)


@inline
def _vectors(n):
    return n + 15 >> 4


@inline
def _load(x, i, n):
    """Vector i of n numbers; lanes behind the last are 0."""
    left = n - 16 * i
    return simd.load_f32(x + 64 * i) if left >= 16 else simd.load_f32_n(x + 64 * i, left)


@inline
def _store(y, i, n, x):
    left = n - 16 * i
    if left >= 16:
        simd.store_f32(y + 64 * i, x)
    else:
        simd.store_f32_n(y + 64 * i, x, left)


@inline
def _within(i, n, x, other):
    """x, but `other` in lanes behind the last of n."""
    return simd.select(simd.iota() < n - 16 * i, x, simd.splat_f32(other))


@inline
def _normalize(y, n, sink):
    """Logits to weights, in place. `sink` is one more logit; -inf is none. Where all are -inf the weights are 0."""
    top = simd.splat_f32(-np.inf)
    for i in range(_vectors(n)):
        top = simd.maximum(_within(i, n, _load(y, i, n), -np.inf), top)
    top = simd.maximum(simd.splat_f32(simd.hmax(top)), simd.splat_f32(sink))
    base = simd.select(top == -np.inf, simd.splat_f32(0.0), top)
    total = simd.splat_f32(0.0)
    for i in range(_vectors(n)):
        x = vmath.exp(_load(y, i, n) - base)
        _store(y, i, n, x)
        total = total + _within(i, n, x, 0.0)
    total = simd.splat_f32(simd.hsum(total)) + vmath.exp(simd.splat_f32(sink) - base)
    factor = simd.select(total == 0.0, simd.splat_f32(0.0), 1.0 / total)
    for i in range(_vectors(n)):
        _store(y, i, n, _load(y, i, n) * factor)


@inline
def _load_f16(x, i, n):
    left = n - 16 * i
    return simd.load_f16(x + 32 * i) if left >= 16 else simd.load_f16_n(x + 32 * i, left)


@template
def _soft_max(mask):
    """`mask`: its type, or none. Block: out, x, mask, sinks (zeros for what is absent) | scale | whether heads have
    slopes | these"""
    load = _load_f16 if mask == "F16" else _load

    @inline
    def masked(p, y, n, i1, i2, i3):
        m = row(p, MASK, i1, i2, i3)
        slope = simd.f32(p, SLOPES + i2) if simd.word(p, ALIBI) != 0 else np.float32(1.0)
        for i in range(_vectors(n)):
            _store(y, i, n, simd.fma(load(m, i, n), simd.splat_f32(slope), _load(y, i, n)))

    @inline
    def plain(p, y, n, i1, i2, i3):
        pass
    add_mask = plain if mask == "none" else masked

    def k(p, ith, nth):
        n, scale, sink = ne(p, OUT, 0), simd.f32(p, SCALE), np.float32(-np.inf)
        first, last = share(n_rows(p, OUT), ith, nth)
        for r in range(first, last):
            i1, i2, i3 = unravel(p, OUT, r)
            x, y = row(p, X, i1, i2, i3), row(p, OUT, i1, i2, i3)
            for i in range(_vectors(n)):
                _store(y, i, n, _load(x, i, n) * scale)
            add_mask(p, y, n, i1, i2, i3)
            if address(p, SINKS) != 0:
                sink = simd.get_f32(address(p, SINKS) + 4 * i2)
            _normalize(y, n, sink)
    return k


@lowers("soft_max")
def soft_max(emit: Emit, node: Tensor) -> bool:
    x, mask, sinks = node.src
    if not f32_rows(x) or (mask is not None and not (mask.type in (F32, F16) and in_rows(mask))):
        return False
    max_bias = float(node.params["max_bias"])
    slopes = alibi_slopes(int(x.ne[2]), max_bias).tolist() if max_bias > 0 else []
    none: tuple[Field, ...] = (0,) * 9
    emit(_soft_max(mask.type.name if mask is not None else "none"), node, x, *(none if mask is None else (mask,)),
         *(none if sinks is None else (sinks,)), float(node.params["scale"]), int(max_bias > 0), *slopes)
    return True
