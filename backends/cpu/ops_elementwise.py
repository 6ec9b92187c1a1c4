"""Element by element: arithmetic with broadcast, activations, gated activations, expert biases.

Comes in: nodes of these ops with F32 rows. Goes out: steps. One template for one source, one for two; what they
compute is a function of vectors, picked when the kernel is made. A result may take the place of its first source.
"""
from __future__ import annotations

from itertools import pairwise

from ggraph import dtypes, ops
from ggraph.tensor import Tensor

from ..lowering import apart
from .join import by_columns, by_tokens
from .kernel import inline, simd, template, vmath
from .layout import ANYHOW, CHUNK, address, contiguous, f32_rows, n_rows, nb, ne, row, share, unravel, window
from .lower import Cuts, Emit, lowers
from .ops_move import BAD_ROW, over_rows
from .trig import sincos

# mypy: disable-error-code="no-untyped-def, no-untyped-call"


# Functions of one vector x and two numbers a, b.

@inline
def _scale(x, a, b):
    return x * a + b


@inline
def _clamp(x, a, b):
    return simd.minimum(simd.splat_f32(b), simd.maximum(simd.splat_f32(a), x))     # NaN stays


@inline
def _fill(x, a, b):
    return simd.splat_f32(a)


@inline
def _softcap(x, a, b):
    """b tanh(a x)"""
    return vmath.tanh(x * a) * b


@inline
def _neg(x):
    return -x


@inline
def _absolute(x):
    return simd.absolute(x)


@inline
def _sqr(x):
    return x * x


@inline
def _sqrt(x):
    return simd.sqrt(x)


@inline
def _relu(x):
    return simd.maximum(simd.splat_f32(0.0), x)                                    # NaN stays


@inline
def _expm1(x):
    """e^x - 1. Near 0 by its own series, since the difference would keep few digits."""
    p = simd.fma(x, simd.splat_f32(1.9875691500e-4), simd.splat_f32(1.3981999507e-3))
    p = simd.fma(p, x, simd.splat_f32(8.3334519073e-3))
    p = simd.fma(p, x, simd.splat_f32(4.1665795894e-2))
    p = simd.fma(p, x, simd.splat_f32(1.6666665459e-1))
    p = simd.fma(p, x, simd.splat_f32(5.0000001201e-1))
    return simd.select(simd.absolute(x) < 0.34, simd.fma(p, x * x, x), vmath.exp(x) - 1.0)


@inline
def _softplus(x):
    """ln(1 + e^x). The rounding of 1 + e is divided out again."""
    e = vmath.exp(x)
    u = e + 1.0
    small = simd.select(u == 1.0, e, vmath.log(u) * e / (u - 1.0))
    return simd.select(x > 20.0, x, small)


@inline
def _elu(x):
    return simd.select(x > 0.0, x, _expm1(x))


@inline
def _step(x):
    zero = simd.splat_f32(0.0)
    return simd.select(x > 0.0, simd.splat_f32(1.0), simd.select(x <= 0.0, zero, x))


@inline
def _sgn(x):
    return simd.select(x > 0.0, simd.splat_f32(1.0), simd.select(x < 0.0, simd.splat_f32(-1.0), x))


@inline
def _hardsigmoid(x):
    return _clamp((x + 3.0) / 6.0, 0.0, 1.0)


@inline
def _hardswish(x):
    return x * _hardsigmoid(x)


_WITH_NUMBERS = {"scale": _scale, "clamp": _clamp, "fill": _fill, "softcap": _softcap}
_FUNCTIONS = {"abs": _absolute, "neg": _neg, "expm1": _expm1, "sqr": _sqr, "sqrt": _sqrt, "relu": _relu,
              "softplus": _softplus, "elu": _elu, "step": _step, "sgn": _sgn,
              "hardsigmoid": _hardsigmoid, "hardswish": _hardswish}            # the rest is in `vmath`
_GATES = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu", "geglu_erf": "gelu_erf", "geglu_quick": "gelu_quick"}


def _function(name):
    """f(x, a, b)"""
    if name in _WITH_NUMBERS:
        return _WITH_NUMBERS[name]
    f = _FUNCTIONS.get(name) or getattr(vmath, name)
    return inline(lambda x, a, b: f(x))


@template
def _map(name):
    """dst, x, a, b, how it is cut (`join`): dst = f(x, a, b)"""
    f = _function(name)

    def k(p, ith, nth):
        n, rows = ne(p, 0, 0), n_rows(p, 0)
        a, b = simd.f32(p, 18), simd.f32(p, 19)
        if simd.word(p, 20) != ANYHOW:
            first, last, start, end = window(p, 0, simd.word(p, 20), ith, nth)
            for r in range(first, last):
                i1, i2, i3 = unravel(p, 0, r)
                _map_chunk(row(p, 1, i1, i2, i3) + 4 * start, address(p, 0) + 4 * (r * n + start), end - start, a, b)
            return
        if contiguous(p, 1, 4 * n):
            n, rows = n * rows, 1
        chunks = (n + CHUNK - 1) // CHUNK
        first, last = share(rows * chunks, ith, nth)
        for i in range(first, last):
            r = i // chunks
            start = (i - r * chunks) * CHUNK
            i1, i2, i3 = unravel(p, 0, r)
            x, y = row(p, 1, i1, i2, i3) + 4 * start, address(p, 0) + 4 * (r * n + start)
            _map_chunk(x, y, min(n - start, CHUNK), a, b)

    @inline
    def _map_chunk(x, y, n, a, b):
        for _ in range(n >> 4):
            simd.store_f32(y, f(simd.load_f32(x), a, b))
            x += 64
            y += 64
        if n & 15:
            simd.store_f32_n(y, f(simd.load_f32_n(x, n & 15), a, b), n & 15)
    return k


def _emit_map(emit: Emit, name: str, node: Tensor, x: Tensor, a: float = 0.0, b: float = 0.0) -> bool:
    return over_rows(emit, _map(name), node, (x,), a, b, cuts=_cuts(node))


def _cuts(node: Tensor) -> Cuts:
    return by_tokens(node.ne[1] * node.ne[2] * node.ne[3]) | by_columns(node.ne[0])


def _enter_unary(name: str) -> None:
    @lowers(name)
    def lower(emit: Emit, node: Tensor) -> bool:
        return _emit_map(emit, name, node, node.src[0])


for _name in ops.UNARY:
    if _name not in ("sin", "cos"):
        _enter_unary(_name)


@template
def _angle(cosine):
    """dst, x"""
    def k(p, ith, nth):
        n = ne(p, 0, 0)
        first, last = share(n_rows(p, 0), ith, nth)
        for r in range(first, last):
            i1, i2, i3 = unravel(p, 0, r)
            x, y = row(p, 1, i1, i2, i3), address(p, 0) + 4 * n * r
            for j in range(0, 4 * n, 4):
                s, c = sincos(simd.get_f32(x + j))
                simd.put_f32(y + j, c if cosine else s)
    return k


def _enter_angle(name: str) -> None:
    @lowers(name)
    def lower(emit: Emit, node: Tensor) -> bool:
        return over_rows(emit, _angle(int(name == "cos")), node, node.src)


_enter_angle("sin")
_enter_angle("cos")


@lowers("scale")
def scale(emit: Emit, node: Tensor) -> bool:
    return _emit_map(emit, "scale", node, node.src[0], float(node.params["s"]), float(node.params["bias"]))


@lowers("clamp")
def clamp(emit: Emit, node: Tensor) -> bool:
    return _emit_map(emit, "clamp", node, node.src[0], float(node.params["lo"]), float(node.params["hi"]))


@lowers("fill")
def fill(emit: Emit, node: Tensor) -> bool:
    return _emit_map(emit, "fill", node, node, float(node.params["value"]))


@lowers("scale", "tanh", "scale")
def softcap(emit: Emit, down: Tensor, tanh: Tensor, up: Tensor) -> bool:
    """cap tanh(x / cap)"""
    if down.params["bias"] or up.params["bias"] or tanh.src[0] is not down or up.src[0] is not tanh:
        return False
    return _emit_map(emit, "softcap", up, down.src[0], float(down.params["s"]), float(up.params["s"]))


# Functions of two vectors and two numbers.

@inline
def _add(x, y, a, b):
    return x + y


@inline
def _sub(x, y, a, b):
    return x - y


@inline
def _mul(x, y, a, b):
    return x * y


@inline
def _div(x, y, a, b):
    return x / y


@inline
def _swiglu_oai(gate, up, alpha, limit):
    g, u = simd.minimum(simd.splat_f32(limit), gate), _clamp(up, -limit, limit)
    return g / (1.0 + vmath.exp(-alpha * g)) * (u + 1.0)


@inline
def _swiglu_clamp(gate, up, limit, b):
    return vmath.silu(simd.minimum(simd.splat_f32(limit), gate)) * _clamp(up, -limit, limit)


_BINARY = {"add": _add, "sub": _sub, "mul": _mul, "div": _div, "swiglu_oai": _swiglu_oai,
           "swiglu_clamp": _swiglu_clamp}


def _function2(name):
    """f(x, y, a, b)"""
    if name in _BINARY:
        return _BINARY[name]
    gate = _function(_GATES[name])
    return inline(lambda x, y, a, b: gate(x, a, b) * y)


@template
def _map2(name, spread):
    """dst, x, y, a, b, how it is cut (`join`), which is not as it likes only where y is as large as x: dst = f(x, y, a, b),
    y broadcast; `spread`: its rows are single elements."""
    f = _function2(name)

    def k(p, ith, nth):
        n, rows, n_y = ne(p, 0, 0), n_rows(p, 0), ne(p, 2, 0)
        a, b = simd.f32(p, 27), simd.f32(p, 28)
        if not spread and simd.word(p, 29) != ANYHOW:
            first, last, start, end = window(p, 0, simd.word(p, 29), ith, nth)
            for r in range(first, last):
                i1, i2, i3 = unravel(p, 0, r)
                chunk(address(p, 0) + 4 * (r * n + start), row(p, 1, i1, i2, i3) + 4 * start,
                      row(p, 2, i1, i2, i3) + 4 * start, end - start, a, b)
            return
        same = not spread and n == n_y and rows == n_rows(p, 2)
        if same and contiguous(p, 1, 4 * n) and contiguous(p, 2, 4 * n):
            n, n_y, rows = n * rows, n * rows, 1
        step = CHUNK if spread or n == n_y else n_y             # a shorter y repeats along the row
        chunks = (n + step - 1) // step
        first, last = share(rows * chunks, ith, nth)
        for i in range(first, last):
            r = i // chunks
            start = (i - r * chunks) * step
            i1, i2, i3 = unravel(p, 0, r)
            x, y = row(p, 1, i1, i2, i3) + 4 * start, row(p, 2, i1, i2, i3)
            out, m = address(p, 0) + 4 * (r * n + start), min(n - start, step)
            if spread:
                chunk_spread(out, x, simd.splat_f32(simd.get_f32(y)), m, a, b)
            else:
                chunk(out, x, y + (4 * start if n == n_y else 0), m, a, b)

    @inline
    def chunk(out, x, y, n, a, b):
        for _ in range(n >> 4):
            simd.store_f32(out, f(simd.load_f32(x), simd.load_f32(y), a, b))
            out += 64
            x += 64
            y += 64
        if n & 15:
            m = n & 15
            simd.store_f32_n(out, f(simd.load_f32_n(x, m), simd.load_f32_n(y, m), a, b), m)

    @inline
    def chunk_spread(out, x, y, n, a, b):
        for _ in range(n >> 4):
            simd.store_f32(out, f(simd.load_f32(x), y, a, b))
            out += 64
            x += 64
        if n & 15:
            simd.store_f32_n(out, f(simd.load_f32_n(x, n & 15), y, a, b), n & 15)
    return k


def _emit_map2(emit: Emit, node: Tensor, a: float = 0.0, b: float = 0.0) -> bool:
    spread = node.src[1].ne[0] == 1 != node.ne[0]
    cuts = _cuts(node) if all(x.ne[0] == node.ne[0] for x in node.src) and not spread else None
    return over_rows(emit, _map2(node.op, int(spread)), node, node.src, a, b, *([] if cuts else [0]), cuts=cuts)


def _enter_binary(name: str) -> None:
    @lowers(name)
    def lower(emit: Emit, node: Tensor) -> bool:
        return _emit_map2(emit, node)


for _name in ("add", "sub", "mul", "div", *ops.GLU):
    _enter_binary(_name)


@inline
def _add_to(x, y, out, n):
    """out = x + y"""
    for _ in range(n >> 4):
        simd.store_f32(out, simd.load_f32(x) + simd.load_f32(y))
        out += 64
        x += 64
        y += 64
    if n & 15:
        simd.store_f32_n(out, simd.load_f32_n(x, n & 15) + simd.load_f32_n(y, n & 15), n & 15)


@template
def _add_all():
    """The number of sources, dst, sources of one shape: their sum, from the first to the last"""
    def k(block, ith, nth):
        p = block + 8
        n = ne(p, 0, 0)
        first, last = share(n_rows(p, 0), ith, nth)
        for r in range(first, last):
            i1, i2, i3 = unravel(p, 0, r)
            out, total = row(p, 0, i1, i2, i3), row(p, 1, i1, i2, i3)
            for t in range(2, simd.word(block, 0) + 1):
                _add_to(total, row(p, t, i1, i2, i3), out, n)
                total = out
    return k


def _enter_sum(n_adds: int) -> None:
    """Adds in a row, as of the experts' results."""
    @lowers(*["add"] * n_adds)
    def lower(emit: Emit, *adds: Tensor) -> bool:
        sources = [*adds[0].src, *(b.src[1] for b in adds[1:])]
        if not (all(b.src[0] is a for a, b in pairwise(adds)) and f32_rows(*sources) and apart(adds[-1], *sources)
                and all(x.ne == adds[0].ne and x.root not in adds for x in sources)):
            return False
        emit(_add_all(), len(sources), adds[-1], *sources)
        return True


for _n in (2, 3):                   # longer runs would save steps of many experts, and cost every plan the look for them
    _enter_sum(_n)


@lowers("swiglu_oai")
def swiglu_oai(emit: Emit, node: Tensor) -> bool:
    return _emit_map2(emit, node, float(node.params["alpha"]), float(node.params["limit"]))


@lowers("swiglu_clamp")
def swiglu_clamp(emit: Emit, node: Tensor) -> bool:
    return _emit_map2(emit, node, float(node.params["limit"]))


@template
def _add_id():
    """dst, a, b, ids: dst = a + row ids[i1, i2] of b"""
    def k(p, ith, nth):
        n = ne(p, 0, 0)
        first, last = share(n_rows(p, 0), ith, nth)
        for r in range(first, last):
            i1, i2, _ = unravel(p, 0, r)
            e = simd.get_i32(address(p, 3) + i1 * nb(p, 3, 0) + i2 * nb(p, 3, 1))
            if e < 0 or e >= ne(p, 2, 1):
                simd.fail(BAD_ROW)
                return
            _add_to(row(p, 1, i1, i2, 0), address(p, 2) + e * nb(p, 2, 1), address(p, 0) + 4 * n * r, n)
    return k


@lowers("add_id")
def add_id(emit: Emit, node: Tensor) -> bool:
    a, b, ids = node.src
    return ids.type is dtypes.I32 and over_rows(emit, _add_id(), node, (a, b), ids)
