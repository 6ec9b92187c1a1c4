"""Norms and sums over rows, with the scaling and shifting of a norm's result fused in.

Comes in: nodes of these ops. Goes out: steps. A row is summed by one thread, in an order that its length alone decides.
"""
from __future__ import annotations

import numpy as np

from ggraph.tensor import Tensor

from ..lowering import apart
from .join import by_tokens
from .kernel import inline, simd, template
from .layout import address, n_rows, ne, row, share, unravel
from .lower import Emit, lowers
from .ops_move import over_rows

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

_ZERO = np.float32(0)


@inline
def _itself(x, mean):
    return x


@inline
def _square(x, mean):
    return (x - mean) * (x - mean)


def _summing(term):
    """f(x, n, mean): the sum of term(x[i], mean), in four chains of 16 lanes."""
    @inline
    def f(x, n, mean):
        s0 = s1 = s2 = s3 = simd.splat_f32(0.0)
        for _ in range(n >> 6):
            s0 += term(simd.load_f32(x), mean)
            s1 += term(simd.load_f32(x + 64), mean)
            s2 += term(simd.load_f32(x + 128), mean)
            s3 += term(simd.load_f32(x + 192), mean)
            x += 256
        for _ in range((n & 63) >> 4):
            s0 += term(simd.load_f32(x), mean)
            x += 64
        if n & 15:
            last = term(simd.load_f32_n(x, n & 15), mean)
            s1 += simd.select(simd.iota() < (n & 15), last, simd.splat_f32(0.0))
        return simd.hsum((s0 + s1) + (s2 + s3))
    return f


_sum, _sum_squares = _summing(_itself), _summing(_square)


def _factor(kind):
    """f(sum of squares, n, eps): what centred values are multiplied by, in all lanes."""
    @inline
    def deviation(total, n, eps):
        return 1.0 / simd.sqrt(simd.splat_f32(total) / n + eps)

    @inline
    def length(total, n, eps):
        return 1.0 / simd.maximum(simd.sqrt(simd.splat_f32(total)), simd.splat_f32(eps))
    return length if kind == "l2_norm" else deviation


def normaliser(kind, scaled, shifted):
    """f(y, x, w, b, n, eps): the norm of the row at x, times w if scaled, plus b if shifted."""
    factor, centred = _factor(kind), kind == "norm"

    @inline
    def result(x, mean, f, w, b):
        y = (x - mean) * f
        y = y * w if scaled else y
        return y + b if shifted else y

    @inline
    def normalise(y, x, w, b, n, eps):
        mean = simd.splat_f32(_sum(x, n, simd.splat_f32(0.0))) / n if centred else simd.splat_f32(0.0)
        f = factor(_sum_squares(x, n, mean), n, eps)
        for j in range(0, 64 * (n >> 4), 64):
            simd.store_f32(y + j, result(simd.load_f32(x + j), mean, f, simd.load_f32(w + j), simd.load_f32(b + j)))
        j, m = 64 * (n >> 4), n & 15
        if m:
            simd.store_f32_n(y + j, result(simd.load_f32_n(x + j, m), mean, f, simd.load_f32_n(w + j, m),
                                           simd.load_f32_n(b + j, m)), m)
    return normalise


@template
def _norm(kind, scaled, shifted):
    """dst, x, [weight if scaled], [bias if shifted], eps"""
    normalise = normaliser(kind, scaled, shifted)
    bias, eps = 2 + scaled, 9 * (2 + scaled + shifted)

    def k(p, ith, nth):
        first, last = share(n_rows(p, 0), ith, nth)
        for r in range(first, last):
            i1, i2, i3 = unravel(p, 0, r)
            x = row(p, 1, i1, i2, i3)
            w = row(p, 2, i1, i2, i3) if scaled else x
            b = row(p, bias, i1, i2, i3) if shifted else x
            normalise(row(p, 0, i1, i2, i3), x, w, b, ne(p, 0, 0), simd.f32(p, eps))
    return k


def _lower_norm(emit: Emit, norm: Tensor, dst: Tensor, *after: Tensor) -> bool:
    """`after`: the weight and the bias, if they are fused in."""
    x = norm.src[0]
    assert x is not None
    if any(t.ne[0] != dst.ne[0] for t in after):
        return False
    kernel = _norm(norm.op, int(len(after) > 0), int(len(after) > 1))
    return apart(dst, x, *after) and over_rows(emit, kernel, dst, (x, *after), float(norm.params["eps"]),
                                               cuts=by_tokens(dst.ne[1] * dst.ne[2] * dst.ne[3]))


def _enter_norm(name: str) -> None:
    @lowers(name)
    def lower(emit: Emit, node: Tensor) -> bool:
        return _lower_norm(emit, node, node)

    @lowers(name, "mul")
    def lower_scaled(emit: Emit, node: Tensor, mul: Tensor) -> bool:
        return follows(node, mul) and _lower_norm(emit, node, mul, mul.src[1])

    @lowers(name, "mul", "add")
    def lower_shifted(emit: Emit, node: Tensor, mul: Tensor, add: Tensor) -> bool:
        return (follows(node, mul) and follows(mul, add)
                and _lower_norm(emit, node, add, mul.src[1], add.src[1]))


def follows(a: Tensor, b: Tensor) -> bool:
    """b's first source is a, and its second is not."""
    return b.src[0] is a and b.src[1].root is not a


for _name in ("norm", "rms_norm", "l2_norm"):
    _enter_norm(_name)


@template
def _row_sum(averaged):
    """dst, x"""
    def k(p, ith, nth):
        n = ne(p, 1, 0)
        first, last = share(n_rows(p, 0), ith, nth)
        for r in range(first, last):
            i1, i2, i3 = unravel(p, 0, r)
            total = simd.splat_f32(_sum(row(p, 1, i1, i2, i3), n, simd.splat_f32(0.0)))
            simd.store_f32_n(address(p, 0) + 4 * r, total / n if averaged else total, 1)
    return k


@template
def _cumsum():
    """dst, x"""
    def k(p, ith, nth):
        first, last = share(n_rows(p, 0), ith, nth)
        for r in range(first, last):
            i1, i2, i3 = unravel(p, 0, r)
            x, y = row(p, 1, i1, i2, i3), row(p, 0, i1, i2, i3)
            total = _ZERO
            for j in range(0, 4 * ne(p, 0, 0), 4):
                total += simd.get_f32(x + j)
                simd.put_f32(y + j, total)
    return k


@lowers("sum_rows")
def sum_rows(emit: Emit, node: Tensor) -> bool:
    return over_rows(emit, _row_sum(0), node, node.src)


@lowers("mean")
def mean(emit: Emit, node: Tensor) -> bool:
    return over_rows(emit, _row_sum(1), node, node.src)


@lowers("cumsum")
def cumsum(emit: Emit, node: Tensor) -> bool:
    return over_rows(emit, _cumsum(), node, node.src)


@template
def _pool_1d():
    """dst, x, k"""
    def k(p, ith, nth):
        n, m = ne(p, 0, 0), simd.word(p, 18)
        first, last = share(n_rows(p, 0), ith, nth)
        for r in range(first, last):
            i1, i2, i3 = unravel(p, 0, r)
            x, y = row(p, 1, i1, i2, i3), address(p, 0) + 4 * n * r
            for i in range(n):
                top = simd.get_f32(x + 4 * m * i)
                for j in range(1, m):
                    v = simd.get_f32(x + 4 * (m * i + j))
                    top = v if v > top or v != v else top                   # NaN stays
                simd.put_f32(y + 4 * i, top)
    return k


@lowers("pool_1d")
def pool_1d(emit: Emit, node: Tensor) -> bool:
    return over_rows(emit, _pool_1d(), node, node.src, int(node.params["k"]))


def _butterflies(n):
    """f(x): sums and differences of lanes 1, 2, 4, 8 apart, as far as n reaches."""
    from .lanes import swap

    def stage(h, before):
        swapped = swap(h)

        @inline
        def f(x):
            x = before(x)
            other = swapped(x)
            return simd.select((simd.iota() & h) == 0, x + other, other - x)
        return f

    f = inline(lambda x: x)
    for h in (1, 2, 4, 8):
        f = stage(h, f) if h < n else f
    return f


@template
def _hadamard(n):
    """dst, x, the factor: runs of n elements"""
    within = _butterflies(n)

    def k(p, ith, nth):
        factor = simd.f32(p, 18)
        first, last = share(n_rows(p, 0), ith, nth)
        for r in range(first, last):
            i1, i2, i3 = unravel(p, 0, r)
            x, y = row(p, 1, i1, i2, i3), row(p, 0, i1, i2, i3)
            for start in range(0, 4 * ne(p, 0, 0), 4 * n):
                run(x + start, y + start, factor)

    @inline
    def run(x, y, factor):
        if n < 16:
            simd.store_f32_n(y, within(simd.load_f32_n(x, n)) * factor, n)
            return
        for j in range(0, 4 * n, 64):
            simd.store_f32(y + j, within(simd.load_f32(x + j)) * factor)
        h = 64
        while h < 4 * n:
            for start in range(0, 4 * n, 2 * h):
                for j in range(start, start + h, 64):
                    a, b = simd.load_f32(y + j), simd.load_f32(y + j + h)
                    simd.store_f32(y + j, a + b)
                    simd.store_f32(y + j + h, a - b)
            h *= 2
    return k


@lowers("hadamard")
def hadamard(emit: Emit, node: Tensor) -> bool:
    n = int(node.params["n"])
    return over_rows(emit, _hadamard(n), node, node.src, n ** -0.5)


@template
def _group_norm():
    """dst, x, n_groups, eps: one thread has one group of one batch"""
    def k(p, ith, nth):
        n, n1, n2 = ne(p, 0, 0), ne(p, 0, 1), ne(p, 0, 2)
        step = (n2 + simd.word(p, 18) - 1) // simd.word(p, 18)
        n_groups = (n2 + step - 1) // step
        first, last = share(n_groups * ne(p, 0, 3), ith, nth)
        for g in range(first, last):
            i3 = g // n_groups
            start = (g - i3 * n_groups) * step
            stop = min(start + step, n2)
            count = n * n1 * (stop - start)
            total = 0.0
            for i2 in range(start, stop):
                for i1 in range(n1):
                    total += _sum(row(p, 1, i1, i2, i3), n, simd.splat_f32(0.0))
            mean, total = simd.splat_f32(total / count), 0.0
            for i2 in range(start, stop):
                for i1 in range(n1):
                    total += _sum_squares(row(p, 1, i1, i2, i3), n, mean)
            f = 1.0 / simd.sqrt(simd.splat_f32(total / count) + simd.f32(p, 19))
            for i2 in range(start, stop):
                for i1 in range(n1):
                    _centre(row(p, 1, i1, i2, i3), row(p, 0, i1, i2, i3), n, mean, f)
    return k


@inline
def _centre(x, y, n, mean, f):
    for _ in range(n >> 4):
        simd.store_f32(y, (simd.load_f32(x) - mean) * f)
        x += 64
        y += 64
    if n & 15:
        simd.store_f32_n(y, (simd.load_f32_n(x, n & 15) - mean) * f, n & 15)


@lowers("group_norm")
def group_norm(emit: Emit, node: Tensor) -> bool:
    return over_rows(emit, _group_norm(), node, node.src, int(node.params["n_groups"]), float(node.params["eps"]))
