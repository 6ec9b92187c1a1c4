"""The op table: one row per op, which is its constructor with its shape and type rule.

In: tensors and parameters. Out: a `Tensor` whose shape is checked here, so that a wrong graph fails where it is written.
Names and meaning are ggml's. What an op computes is defined by `backends/ref`; where it runs is decided by the scheduler.
Shapes in comments are in ggml order, contiguous axis first.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from . import dtypes
from .dtypes import DType
from .tensor import F32, I32, Tensor, pad4, strides

OPS: dict[str, Callable[..., Tensor]] = {}
VIEWS = frozenset({"none", "view", "reshape", "permute", "transpose"})     # nothing to compute
C = TypeVar("C", bound=Callable[..., Tensor])


def op(make: C) -> C:
    """Enter a constructor in the table under its own name."""
    assert make.__name__ not in OPS, make.__name__
    OPS[make.__name__] = make
    return make


def check(condition: bool, what: str, *tensors: Tensor) -> None:
    if not condition:
        raise ValueError(what + ": " + "; ".join(map(repr, tensors)))


def repeats(a: Tensor, b: Tensor) -> bool:
    """`b` can be broadcast over `a`."""
    return all(x == y or y == 1 or x % y == 0 for x, y in zip(a.ne, b.ne))


# --- views: other shape, same bytes -------------------------------------------------------------------------------

def _view(name: str, x: Tensor, ne: Sequence[int], nb: Sequence[int] | None, offs: int = 0) -> Tensor:
    return Tensor(name, x.type, ne, (x,), nb=nb, view_src=x.root, view_offs=x.view_offs + offs)


@op
def view(x: Tensor, ne: Sequence[int], nb: Sequence[int] = (), offset: int = 0) -> Tensor:
    """A window of x: shape `ne`, byte strides `nb` of axes 1.. (contiguous if not given), byte offset."""
    return _view("view", x, ne, (x.nb[0], *nb) if nb else None, offset)


@op
def reshape(x: Tensor, ne: Sequence[int]) -> Tensor:
    n = pad4(ne)
    check(x.contiguous, "reshape of a tensor that is not contiguous", x)
    check(x.numel == n[0] * n[1] * n[2] * n[3], f"reshape to {n} changes the number of elements", x)
    return _view("reshape", x, n, None)


@op
def permute(x: Tensor, axes: Sequence[int]) -> Tensor:
    """Axis i of x becomes axis axes[i] of the result, as ggml_permute."""
    ne, nb = [0] * 4, [0] * 4
    for i, a in enumerate(axes):
        ne[a], nb[a] = x.ne[i], x.nb[i]
    return _view("permute", x, ne, nb)


@op
def transpose(x: Tensor) -> Tensor:
    n, b = x.ne, x.nb
    return _view("transpose", x, (n[1], n[0], n[2], n[3]), (b[1], b[0], b[2], b[3]))


# --- moving data --------------------------------------------------------------------------------------------------

@op
def cont(x: Tensor, ne: Sequence[int] | None = None) -> Tensor:
    """A contiguous copy, of another shape if given."""
    return Tensor("cont", x.type, x.ne if ne is None else ne, (x,))


@op
def cast(x: Tensor, type: DType) -> Tensor:
    """A contiguous copy in another type; quantized types are rounded to."""
    return Tensor("cast", type, x.ne, (x,))


@op
def cpy(x: Tensor, dst: Tensor) -> Tensor:
    """Write x into dst (any strides, type converted); the result is dst."""
    check(x.numel == dst.numel, "cpy between different numbers of elements", x, dst)
    return Tensor("cpy", dst.type, dst.ne, (x, dst), nb=dst.nb, view_src=dst.root, view_offs=dst.view_offs)


@op
def get_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x [n, m, b2, b3], rows I32 [r, b2, b3] -> F32 [n, r, b2, b3] (I32 stays I32)."""
    check(rows.type is I32, "row numbers must be I32", rows)
    check(x.ne[2] == rows.ne[1] and x.ne[3] == rows.ne[2], "get_rows: batch axes differ", x, rows)
    return Tensor("get_rows", I32 if x.type is I32 else F32, (x.ne[0], rows.ne[0], rows.ne[1], rows.ne[2]), (x, rows))


@op
def set_rows(dst: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    """dst[:, rows[i]] = x[:, i] with conversion to dst's type; the result is dst."""
    check(dst.ne[0] == x.ne[0] and dst.ne[2:] == x.ne[2:] and x.ne[1] == rows.ne[0], "set_rows: shapes differ", dst, x)
    check(x.ne[2] % rows.ne[1] == 0 and x.ne[3] % rows.ne[2] == 0, "set_rows: row numbers do not repeat", x, rows)
    return Tensor("set_rows", dst.type, dst.ne, (dst, x, rows), nb=dst.nb, view_src=dst.root, view_offs=dst.view_offs)


@op
def concat(a: Tensor, b: Tensor, axis: int) -> Tensor:
    """a and b joined along axis `axis`; the other axes and the type are the same."""
    check(a.type is b.type, "concat: types differ", a, b)
    check(all(x == y for i, (x, y) in enumerate(zip(a.ne, b.ne)) if i != axis), "concat: shapes differ", a, b)
    ne = list(a.ne)
    ne[axis] = a.ne[axis] + b.ne[axis]
    return Tensor("concat", a.type, ne, (a, b), {"axis": axis})


@op
def repeat(x: Tensor, ne: Sequence[int]) -> Tensor:
    """Tile x to shape `ne`."""
    return Tensor("repeat", x.type, ne, (x,))


@op
def fill(x: Tensor, value: float) -> Tensor:
    """A tensor of x's shape that holds `value` everywhere."""
    return Tensor("fill", F32, x.ne, (x,), {"value": value})


# --- matrix products ----------------------------------------------------------------------------------------------

@op
def mul_mat(a: Tensor, b: Tensor) -> Tensor:
    """a [k, n, a2, a3] (any type), b F32 [k, m, b2, b3], b2 % a2 == b3 % a3 == 0 -> F32 [n, m, b2, b3]."""
    check(a.ne[0] == b.ne[0], "mul_mat: inner axes differ", a, b)
    check(b.ne[2] % a.ne[2] == 0 and b.ne[3] % a.ne[3] == 0, "mul_mat: cannot broadcast", a, b)
    return Tensor("mul_mat", F32, (a.ne[1], b.ne[1], b.ne[2], b.ne[3]), (a, b))


@op
def mul_mat_id(a: Tensor, b: Tensor, ids: Tensor) -> Tensor:
    """a [k, n, n_expert], b F32 [k, n_used or 1, n_tokens], ids I32 [n_used, n_tokens] -> F32 [n, n_used, n_tokens]."""
    check(a.ne[0] == b.ne[0] and b.ne[2] == ids.ne[1], "mul_mat_id: shapes differ", a, b, ids)
    return Tensor("mul_mat_id", F32, (a.ne[1], ids.ne[0], b.ne[2]), (a, b, ids))


@op
def out_prod(a: Tensor, b: Tensor) -> Tensor:
    """a [n, k, ..], b [m, k, ..] -> [n, m, ..]: the sum over k of outer products."""
    check(a.ne[1] == b.ne[1], "out_prod: inner axes differ", a, b)
    return Tensor("out_prod", F32, (a.ne[0], b.ne[0], b.ne[2], b.ne[3]), (a, b))


# --- element by element -------------------------------------------------------------------------------------------

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


# --- rows ---------------------------------------------------------------------------------------------------------

def _norm(name: str, doc: str) -> Callable[[Tensor, float], Tensor]:
    def make(x: Tensor, eps: float) -> Tensor:
        return Tensor(name, F32, x.ne, (x,), {"eps": eps})
    make.__name__, make.__doc__ = name, doc + " over axis 0"
    return op(make)


norm = _norm("norm", "(x - mean) / sqrt(var + eps)")
rms_norm = _norm("rms_norm", "x / sqrt(mean(x^2) + eps)")
l2_norm = _norm("l2_norm", "x / max(sqrt(sum(x^2)), eps)")


@op
def group_norm(x: Tensor, n_groups: int, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) over each of `n_groups` groups of axis 2 (with axes 0 and 1)."""
    return Tensor("group_norm", F32, x.ne, (x,), {"n_groups": n_groups, "eps": eps})


@op
def sum_rows(x: Tensor) -> Tensor:
    return Tensor("sum_rows", F32, (1, *x.ne[1:]), (x,))


@op
def mean(x: Tensor) -> Tensor:
    return Tensor("mean", F32, (1, *x.ne[1:]), (x,))


@op
def cumsum(x: Tensor) -> Tensor:
    """Running sum along axis 0."""
    return Tensor("cumsum", F32, x.ne, (x,))


@op
def soft_max(x: Tensor, mask: Tensor | None = None, sinks: Tensor | None = None, scale: float = 1.0,
             max_bias: float = 0.0) -> Tensor:
    """softmax over axis 0 of x*scale + slope(head)*mask.

    x [n_kv, n_tokens, n_head, n_stream], mask F32/F16 [n_kv, n_tokens, 1, n_stream]; slope is 1 unless max_bias > 0
    (ALiBi). sinks F32 [n_head]: one more logit per head that takes part in the sum and yields nothing.
    """
    if mask is not None:
        check(mask.ne[0] == x.ne[0] and x.ne[1] == mask.ne[1], "soft_max: mask shape differs", x, mask)
    return Tensor("soft_max", F32, x.ne, (x, mask, sinks), {"scale": scale, "max_bias": max_bias})


@op
def argsort(x: Tensor, descending: bool = True) -> Tensor:
    """I32 order of each row; equal values keep the lower index first."""
    return Tensor("argsort", I32, x.ne, (x,), {"descending": descending})


@op
def top_k(x: Tensor, k: int) -> Tensor:
    """I32 [k, ..]: indices of the k largest of each row, largest first; equal values: the lower index first."""
    return Tensor("top_k", I32, (k, *x.ne[1:]), (x,), {"k": k})


# --- attention ----------------------------------------------------------------------------------------------------

NORMAL, NEOX, MROPE, VISION, IMROPE = 0, 2, 8, 24, 40       # ggml's rope modes


@op
def rope(x: Tensor, pos: Tensor, factors: Tensor | None, *, n_dims: int, mode: int, freq_base: float,
         freq_scale: float = 1.0, ext_factor: float = 0.0, attn_factor: float = 1.0, beta_fast: float = 32.0,
         beta_slow: float = 1.0, n_ctx_orig: int = 0, sections: Sequence[int] = (0, 0, 0, 0),
         offset: int = 0) -> Tensor:
    """Rotate n_dims dimensions, from `offset` on, of each head of x [head, n_head, n_tokens] by its position.

    pos I32 [n_tokens], or [4 n_tokens] (axis after axis) for the multi-axis modes; factors F32 [n_dims/2] divide the
    angles. YaRN's parameters as in ggml_rope_ext.
    """
    check(n_dims % 2 == 0 and offset + n_dims <= x.ne[0], f"rope of {n_dims} dimensions from {offset} on", x)
    check(mode != VISION or (n_dims * 2 == x.ne[0] and not offset), "rope: VISION turns the whole head", x)
    check(pos.ne[0] == x.ne[2] * (4 if mode & MROPE else 1), "rope: wrong number of positions", x, pos)
    check(factors is None or factors.ne[0] * 2 >= n_dims, "rope: too few frequency factors", x)
    params: dict[str, Any] = dict(n_dims=n_dims, mode=mode, freq_base=freq_base, freq_scale=freq_scale,
                                  ext_factor=ext_factor, attn_factor=attn_factor, beta_fast=beta_fast,
                                  beta_slow=beta_slow, n_ctx_orig=n_ctx_orig, sections=tuple(sections), offset=offset)
    return Tensor("rope", F32, x.ne, (x, pos, factors), params)


@op
def flash_attn_ext(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None = None,
                   cells: Tensor | None = None, spans: Tensor | None = None, *, scale: float,
                   max_bias: float = 0.0, logit_softcap: float = 0.0) -> Tensor:
    """softmax(scale q k + mask) v in one op: F32 [dv, n_head, n_tokens, n_stream].

    q F32 [dk, n_tokens, n_head, n_stream]; k [dk, n_kv, n_head_kv, n_stream], v [dv, ...] of any cache type;
    mask F32/F16 [n_kv, n_tokens, 1, n_stream] is the definition of who sees what. `cells` I32 [n_cells] and `spans`
    I32 [n_tokens * n_stream, 4] say the same as lists in position order (`memory.kv.ordered`), counted in rows of the
    cache that k and v are views of: a kernel may use them instead, so that other sequences cost nothing and the order
    of summation depends on the sequence alone.
    """
    check(q.ne[0] == k.ne[0] and q.ne[2] % k.ne[2] == 0 and k.ne[1] == v.ne[1], "flash_attn_ext: shapes differ", q, k, v)
    params = {"scale": scale, "max_bias": max_bias, "logit_softcap": logit_softcap}
    return Tensor("flash_attn_ext", F32, (v.ne[0], q.ne[2], q.ne[1], q.ne[3]), (q, k, v, mask, sinks, cells, spans), params)


