"""The op table: one row per op, which is its constructor with its shape and type rule.

In: tensors and parameters. Out: a `Tensor` whose shape is checked here, so that a wrong graph fails where it is
written. Names and meaning are ggml's. What an op computes is defined by `backends/ref`; where it runs is decided by the
scheduler. Shapes in comments are in ggml order, contiguous axis first.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .dtypes import DType
from .size import Size
from .tensor import F32, I32, Tensor, pad4

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


def _four(amounts: Sequence[int]) -> tuple[int, ...]:
    """One amount for each axis; those of missing axes are 0."""
    return (*amounts, *(0,) * (4 - len(amounts)))


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
    """The same elements in shape `ne`; x must be contiguous."""
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
    """Axes 0 and 1 change places."""
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


@op
def arange(start: float, stop: float, step: float) -> Tensor:
    """F32 [n]: start, start + step, .. below stop."""
    check(not any(isinstance(x, Size) for x in (start, stop, step)), "arange needs constants: fill an input instead")
    return Tensor("arange", F32, (math.ceil((stop - start) / step),), (), {"start": start, "step": step})


@op
def pad(x: Tensor, right: Sequence[int], left: Sequence[int] = (0, 0, 0, 0)) -> Tensor:
    """x between `left` and `right` zeros along each axis."""
    check(not any(isinstance(n, Size) for n in left), "pad: the left side depends on the batch", x)
    ne = [n + a + b for n, a, b in zip(x.ne, _four(left), _four(right))]
    return Tensor("pad", F32, ne, (x,), {"left": _four(left)})


@op
def roll(x: Tensor, shifts: Sequence[int]) -> Tensor:
    """Element i of an axis moves to i + shift, what leaves the end comes in at the start."""
    check(not any(isinstance(n, Size) for n in shifts), "roll: a shift depends on the batch", x)
    return Tensor("roll", F32, x.ne, (x,), {"shifts": _four(shifts)})


@op
def diag(x: Tensor) -> Tensor:
    """x [n, 1, b2, b3] -> [n, n, b2, b3] with x on the diagonal and zeros beside it."""
    check(x.ne[1] == 1, "diag: x is not a row", x)
    return Tensor("diag", F32, (x.ne[0], x.ne[0], x.ne[2], x.ne[3]), (x,))


@op
def tri(x: Tensor, *, lower: bool, diag: bool) -> Tensor:
    """Keep the lower (axis 0 below axis 1) or upper triangle of x [n, n, b2, b3], with or without the diagonal."""
    check(x.ne[0] == x.ne[1], "tri: x is not square", x)
    return Tensor("tri", F32, x.ne, (x,), {"lower": lower, "diag": diag})


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
    check(b.ne[2] % a.ne[2] == 0 and b.ne[3] % a.ne[3] == 0, "out_prod: cannot broadcast", a, b)
    return Tensor("out_prod", F32, (a.ne[0], b.ne[0], b.ne[2], b.ne[3]), (a, b))


@op
def solve_tri(a: Tensor, b: Tensor) -> Tensor:
    """x [m, n, ..] with a x = b, where b is [m, n, ..] and of a [n, n, ..] only the lower triangle is read."""
    check(a.ne[0] == a.ne[1] == b.ne[1] and a.ne[2:] == b.ne[2:], "solve_tri: shapes differ", a, b)
    return Tensor("solve_tri", F32, b.ne, (a, b))


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
    """[n, ..] -> [1, ..]: the sum over axis 0."""
    return Tensor("sum_rows", F32, (1, *x.ne[1:]), (x,))


@op
def mean(x: Tensor) -> Tensor:
    """[n, ..] -> [1, ..]: the mean over axis 0."""
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
    check(k <= x.ne[0], f"top_k: fewer than {k} values", x)
    return Tensor("top_k", I32, (k, *x.ne[1:]), (x,), {"k": k})


@op
def pool_1d(x: Tensor, k: int) -> Tensor:
    """The maximum of each k neighbours of axis 0: [n, ..] -> [n / k, ..]."""
    check(x.ne[0] % k == 0, f"pool_1d: rows are not multiples of {k}", x)
    return Tensor("pool_1d", F32, (x.ne[0] // k, *x.ne[1:]), (x,), {"k": k})


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
def hadamard(x: Tensor, n: int) -> Tensor:
    """Each run of n (a power of two) elements of axis 0 times the orthonormal Walsh-Hadamard matrix; its own inverse.

    It spreads outliers evenly before K and V are quantized.
    """
    check(n & (n - 1) == 0 and x.ne[0] % n == 0, f"hadamard: rows are not a multiple of {n}", x)
    return Tensor("hadamard", F32, x.ne, (x,), {"n": n})


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
    check(q.ne[0] == k.ne[0] and k.ne[1] == v.ne[1] and q.ne[2] % k.ne[2] == q.ne[2] % v.ne[2] == 0
          and q.ne[3] == k.ne[3] == v.ne[3], "flash_attn_ext: shapes differ", q, k, v)
    params = {"scale": scale, "max_bias": max_bias, "logit_softcap": logit_softcap}
    return Tensor("flash_attn_ext", F32, (v.ne[0], q.ne[2], q.ne[1], q.ne[3]), (q, k, v, mask, sinks, cells, spans),
                  params)

# --- recurrences: token by token, each sequence from its own state ------------------------------------------------
#
# A result holds the outputs of all tokens and, behind them, the new states; views take it apart. Sources hold the
# sequences one after the other, all of the same number of tokens.

@op
def ssm_conv(x: Tensor, kernel: Tensor) -> Tensor:
    """Causal convolution of each channel: x [d_conv - 1 + n_tokens, d_inner, n_seqs], kernel [d_conv, d_inner] ->
    [d_inner, n_tokens, n_seqs]."""
    check(x.ne[1] == kernel.ne[1], "ssm_conv: channels differ", x, kernel)
    return Tensor("ssm_conv", F32, (kernel.ne[1], x.ne[0] - kernel.ne[0] + 1, x.ne[2]), (x, kernel))


@op
def ssm_scan(s: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, ids: Tensor,
             n_snapshots: int = 1) -> Tensor:
    """The selective scan of Mamba (A [d_state, n_head]) and Mamba-2 (A [1, n_head]).

    With dt' = softplus(dt): s = s exp(dt' A) + dt' x B and y = s C for each token, where s [d_state, dim, n_head, rows]
    is row ids[i] for sequence i; x [dim, n_head, n_tokens, n_seqs], dt [n_head, n_tokens, n_seqs], B and C [d_state,
    n_group, n_tokens, n_seqs], each group serving neighbouring heads. The result is flat: y as x is, then
    `n_snapshots` times [d_state, dim, n_head, n_seqs]: the last state, that of one token before, ...; where there are
    too few tokens, the state that came in.
    """
    d_state, dim, n_head, n_seqs = s.ne[0], x.ne[0], x.ne[1], x.ne[3]
    check(s.ne[1:3] == x.ne[:2] and ids.ne[0] == n_seqs and ids.type is I32, "ssm_scan: states do not fit", s, x, ids)
    check(dt.ne[:3] == (n_head, *x.ne[2:]), "ssm_scan: dt does not fit", dt, x)
    check(A.ne[0] in (1, d_state) and A.ne[1] == n_head, "ssm_scan: A does not fit", A, x)
    check(B.ne == C.ne and B.ne[0] == d_state and n_head % B.ne[1] == 0 and B.ne[2:] == x.ne[2:],
          "ssm_scan: B or C does not fit", B, C, x)
    n = x.numel + n_snapshots * (d_state * dim * n_head * n_seqs)
    return Tensor("ssm_scan", F32, (n,), (s, x, dt, A, B, C, ids), {"n_snapshots": n_snapshots})


@op
def gated_delta_net(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor,
                    n_snapshots: int = 1) -> Tensor:
    """The gated delta rule, with one decay per head (g [1, n_head, ..]) or per key channel (g [d, n_head, ..]).

    S = exp(g) S, then S += k outer beta (v - S k), then the output is S q / sqrt(d), for each token. v [d, n_head,
    n_tokens, n_seqs]; q and k have n_head_k heads, head h of v uses h % n_head_k; beta [1, n_head, ..]; state [d (of
    k), d (of v), n_head, n_seqs]. The result [d n_head, ..] holds as rows the outputs [d, n_head, n_tokens, n_seqs],
    then `n_snapshots` states, as in ssm_scan.
    """
    d, n_head, n_tokens, n_seqs = v.ne
    check(q.ne == k.ne and k.ne[0] == d and n_head % k.ne[1] == 0 and k.ne[2:] == v.ne[2:],
          "gated_delta_net: q or k does not fit", q, k, v)
    check(g.ne[0] in (1, d) and g.ne[1:] == v.ne[1:] and beta.ne == (1, *v.ne[1:]),
          "gated_delta_net: g or beta does not fit", g, beta, v)
    check(state.ne == (d, d, n_head, n_seqs), "gated_delta_net: state does not fit", state, v)
    return Tensor("gated_delta_net", F32, (d * n_head, n_tokens * n_seqs + n_snapshots * d * n_seqs),
                  (q, k, v, g, beta, state), {"n_snapshots": n_snapshots})


def _linear(name: str, src: tuple[Tensor, ...], per_token: tuple[Tensor, ...], **params: Any) -> Tensor:
    """`per_token` all [d, n_head, n_tokens], the last source a state [d d n_head, n_seqs] -> [d n_head, n_tokens + d
    n_seqs]."""
    d, n_head, n_tokens = src[0].ne[:3]
    check(all(x.ne == (d, n_head, n_tokens, 1) for x in per_token), f"{name}: shapes differ", *per_token)
    check(src[-1].ne[0] == d * d * n_head, f"{name}: state does not fit", src[-1], src[0])
    return Tensor(name, F32, (d * n_head, n_tokens + d * src[-1].ne[1]), src, params)


@op
def rwkv_wkv6(k: Tensor, v: Tensor, r: Tensor, tf: Tensor, td: Tensor, state: Tensor) -> Tensor:
    """RWKV-6: y = r (S + tf k outer v), then S = td S + k outer v; tf [d, n_head] is the weight of the token itself.

    All others [d, n_head, n_tokens of all sequences]; state [d d n_head, n_seqs], S [v, k] -> rows of y, then of S.
    """
    check(tf.ne[0] == k.ne[0] and tf.ne[1] == k.ne[1], "rwkv_wkv6: tf does not fit", tf, k)
    return _linear("rwkv_wkv6", (k, v, r, tf, td, state), (k, v, r, td))


@op
def rwkv_wkv7(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor) -> Tensor:
    """RWKV-7: S = S w + v outer k + (S a) outer b, then y = S r; shapes as rwkv_wkv6, but S [k, v]."""
    return _linear("rwkv_wkv7", (r, w, k, v, a, b, state), (r, w, k, v, a, b))


@op
def gated_linear_attn(k: Tensor, v: Tensor, q: Tensor, g: Tensor, state: Tensor, scale: float) -> Tensor:
    """S = g S + k outer v, then y = scale q S; shapes as rwkv_wkv6, but g may be one for each head [1, n_head, ..] and the same
    for all tokens [.., 1]."""
    check(repeats(k, g) and g.ne[1] == k.ne[1], "gated_linear_attn: g does not fit", g, k)
    return _linear("gated_linear_attn", (k, v, q, g, state), (k, v, q), scale=scale)
