"""Sorting rows: argsort and top_k, both as "the best k of a row, best first".

Comes in: nodes of these ops. Goes out: steps. Of equal values the one with the lower index comes first, and NaN come
last: so every order has one answer only, and any way of sorting gives it.
"""
from __future__ import annotations

from ggraph.tensor import Tensor

from .kernel import inline, simd, template
from .layout import n_rows, ne, row, share, unravel
from .lower import Emit, lowers
from .ops_move import over_rows

# mypy: disable-error-code="no-untyped-def, no-untyped-call"


@inline
def _value(x, sign, i):
    return simd.get_f32(x + 4 * i) * sign


@inline
def _behind(x, sign, i, j):
    """Whether element i of the row at x comes after element j."""
    a, b = _value(x, sign, i), _value(x, sign, j)
    if a < b or (a != a and b == b):
        return True
    return i > j and not (b < a or (b != b and a == a))


@inline
def _sink(x, sign, heap, n, hole, i):
    """Put index i into the heap, from `hole` downwards: above it only what comes after it."""
    while 2 * hole + 1 < n:
        child = 2 * hole + 1
        low = simd.get_i32(heap + 4 * child)
        if child + 1 < n and _behind(x, sign, simd.get_i32(heap + 4 * child + 4), low):
            child += 1
            low = simd.get_i32(heap + 4 * child)
        if not _behind(x, sign, low, i):
            break
        simd.put_i32(heap + 4 * hole, low)
        hole = child
    simd.put_i32(heap + 4 * hole, i)


@template
def _best():
    """dst, x, whether the smallest are the best"""
    def k(p, ith, nth):
        n, kept = ne(p, 1, 0), ne(p, 0, 0)
        sign = -1 if simd.word(p, 18) else 1
        first, last = share(n_rows(p, 0), ith, nth)
        for r in range(first, last):
            i1, i2, i3 = unravel(p, 0, r)
            x, heap = row(p, 1, i1, i2, i3), row(p, 0, i1, i2, i3)
            for i in range(kept):
                simd.put_i32(heap + 4 * i, i)
            for i in range(kept // 2 - 1, -1, -1):
                _sink(x, sign, heap, kept, i, simd.get_i32(heap + 4 * i))
            top = _value(x, sign, simd.get_i32(heap))           # of the last of the best
            for i in range(kept, n):
                v = _value(x, sign, i)
                if v > top or (top != top and v == v):
                    _sink(x, sign, heap, kept, 0, i)
                    top = _value(x, sign, simd.get_i32(heap))
            for m in range(kept - 1, 0, -1):
                i = simd.get_i32(heap + 4 * m)
                simd.put_i32(heap + 4 * m, simd.get_i32(heap))
                _sink(x, sign, heap, m, 0, i)
    return k


@lowers("argsort")
def argsort(emit: Emit, node: Tensor) -> bool:
    return over_rows(emit, _best(), node, node.src, int(not node.params["descending"]))


@lowers("top_k")
def top_k(emit: Emit, node: Tensor) -> bool:
    return over_rows(emit, _best(), node, node.src, 0)
