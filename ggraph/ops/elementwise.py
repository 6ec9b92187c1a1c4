"""Element by element: arithmetic, functions of one value, gated products of two."""
from __future__ import annotations

from collections.abc import Callable

from ggraph.tensor import F32, Tensor

from .table import check, op, repeats


def _binary(name: str, doc: str) -> Callable[[Tensor, Tensor], Tensor]:
    def make(a: Tensor, b: Tensor) -> Tensor:
        check(repeats(a, b), f"{name}: b does not repeat into a", a, b)
        return Tensor(name, F32, a.ne, (a, b))
    make.__name__, make.__doc__ = name, doc + "; b is broadcast over a"
    return op(make)


add = _binary("add", "a + b")
sub = _binary("sub", "a - b")
mul = _binary("mul", "a * b")
div = _binary("div", "a / b")


@op
def add_id(a: Tensor, b: Tensor, ids: Tensor) -> Tensor:
    """a [n, n_used, n_tokens] + b[:, ids] with b [n, n_expert], ids I32 [n_used, n_tokens]: the bias of each expert."""
    check(a.ne[0] == b.ne[0] and a.ne[1] == ids.ne[0] and a.ne[2] == ids.ne[1], "add_id: shapes differ", a, b, ids)
    return Tensor("add_id", F32, a.ne, (a, b, ids))


@op
def scale(x: Tensor, s: float, bias: float = 0.0) -> Tensor:
    """x * s + bias"""
    return Tensor("scale", F32, x.ne, (x,), {"s": s, "bias": bias})


@op
def clamp(x: Tensor, lo: float, hi: float) -> Tensor:
    """min(max(x, lo), hi)"""
    return Tensor("clamp", F32, x.ne, (x,), {"lo": lo, "hi": hi})


UNARY: list[str] = []
GLU: list[str] = []


def _unary(name: str, doc: str) -> Callable[[Tensor], Tensor]:
    def make(x: Tensor) -> Tensor:
        return Tensor(name, F32, x.ne, (x,))
    make.__name__, make.__doc__ = name, doc
    UNARY.append(name)
    return op(make)


abs = _unary("abs", "|x|")
neg = _unary("neg", "-x")
exp = _unary("exp", "e^x")
expm1 = _unary("expm1", "e^x - 1")
log = _unary("log", "ln x")
sqr = _unary("sqr", "x^2")
sqrt = _unary("sqrt", "sqrt x")
sin = _unary("sin", "sin x")
cos = _unary("cos", "cos x")
relu = _unary("relu", "max(x, 0)")
gelu = _unary("gelu", "x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))")
gelu_erf = _unary("gelu_erf", "x/2 (1 + erf(x / sqrt 2))")
gelu_quick = _unary("gelu_quick", "x / (1 + e^(-1.702 x))")
silu = _unary("silu", "x / (1 + e^-x)")
sigmoid = _unary("sigmoid", "1 / (1 + e^-x)")
tanh = _unary("tanh", "tanh x")
softplus = _unary("softplus", "ln(1 + e^x), x above 20")
elu = _unary("elu", "x above 0, e^x - 1 below")
step = _unary("step", "1 above 0, else 0")
sgn = _unary("sgn", "-1, 0 or 1")
hardsigmoid = _unary("hardsigmoid", "min(1, max(0, (x + 3) / 6))")
hardswish = _unary("hardswish", "x min(1, max(0, (x + 3) / 6))")


def _glu(name: str, doc: str) -> Callable[[Tensor, Tensor], Tensor]:
    def make(gate: Tensor, up: Tensor) -> Tensor:
        check(gate.ne == up.ne, f"{name}: shapes differ", gate, up)
        return Tensor(name, F32, gate.ne, (gate, up))
    make.__name__, make.__doc__ = name, doc
    GLU.append(name)
    return op(make)


swiglu = _glu("swiglu", "silu(gate) * up")
geglu = _glu("geglu", "gelu(gate) * up")
reglu = _glu("reglu", "relu(gate) * up")
geglu_erf = _glu("geglu_erf", "gelu_erf(gate) * up")
geglu_quick = _glu("geglu_quick", "gelu_quick(gate) * up")


@op
def swiglu_oai(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """g / (1 + e^(-alpha g)) * (u + 1) with g = min(gate, limit), u = clamp(up, -limit, limit)."""
    check(gate.ne == up.ne, "swiglu_oai: shapes differ", gate, up)
    return Tensor("swiglu_oai", F32, gate.ne, (gate, up), {"alpha": alpha, "limit": limit})


@op
def swiglu_clamp(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit)"""
    check(gate.ne == up.ne, "swiglu_clamp: shapes differ", gate, up)
    return Tensor("swiglu_clamp", F32, gate.ne, (gate, up), {"limit": limit})
