"""Recurrences: which nodes have native kernels, and the blocks of these.

Comes in: ssm_conv, ssm_scan and gated_delta_net nodes, and the nodes around them that read and write state rows. Goes out:
steps. What the kernels do is in `recurrent_*`, which are imported (with Numba) only where one must be compiled.

A state is read and written where it is kept, without copies, where the nodes that read and write it stand beside the
recurrence: a step never writes the row that it reads, so any order of blocks is right.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

from ggraph.dtypes import F32
from ggraph.tensor import Tensor, strides

from ..lowering import apart, packed
from ..states import goes_on, row_numbers, rows_of, stored
from .kernel import template
from .layout import f32_rows, shaped
from .lower import Emit, Field, lowers
from .ops_elementwise import _map
from .ops_move import as_rows

NOTHING: tuple[Field, ...] = (0,) * 9
SNAPSHOTS = range(1, 18)                # numbers of kept states that are written in place; more go through copies


@template
def _delta_net(n, per_channel, in_place):                               # type: ignore[no-untyped-def]
    from .recurrent_delta import delta_net
    return delta_net(n, per_channel, in_place)


@template
def _scan(n, height, per_channel, to_rows):                             # type: ignore[no-untyped-def]
    from .recurrent_scan import scan
    return scan(n, height, per_channel, to_rows)


@template
def _linear(op, n, in_place):                                           # type: ignore[no-untyped-def]
    from .recurrent_linear import linear
    return linear(op, n, in_place)


@template
def _conv_going_on(d_conv, biased, act):                                # type: ignore[no-untyped-def]
    from .recurrent_conv import going_on
    return going_on(d_conv, biased, act)


@template
def _conv():                                                            # type: ignore[no-untyped-def]
    from .recurrent_conv import alone
    return alone()


# State rows.

def behind(node: Tensor, n_outputs: int, n: int, n_seqs: int) -> Tensor:
    """The states [n, n_seqs, n_snapshots] that an op's result holds behind its outputs."""
    shape = (n, n_seqs, node.params["n_snapshots"])
    return Tensor("view", F32, shape, (node,), view_src=node.root, view_offs=node.view_offs + F32.nbytes * n_outputs)


def mapped(emit: Emit, op: str, x: Tensor) -> tuple[Field, ...]:
    """A copy of x with `op` applied, in scratch memory."""
    place, _ = emit.scratch(("recurrence", op), int(x.numel) * F32.nbytes)
    words: tuple[Field, ...] = (place, *x.ne, *strides(F32, x.ne))
    emit(_map(op), *words, x, 0.0, 0.0, 0)
    return words


# The gated delta rule.

def _delta(emit: Emit, node: Tensor, old: Sequence[Field], new: Sequence[Field], in_place: bool) -> bool:
    q, k, v, g, beta, _ = node.src
    d, per_channel = int(v.ne[0]), int(g.ne[0]) > 1
    if d % 16 or not f32_rows(q, k, v, g, beta):
        return False
    decays = mapped(emit, "exp", g) if per_channel else (g,)
    emit(_delta_net(d // 16, int(per_channel), int(in_place)), node, q, k, v, *decays, beta, *old, *new, d ** -0.5,
         node.params["n_snapshots"])
    return True


@lowers("gated_delta_net")
def gated_delta_net(emit: Emit, node: Tensor) -> bool:
    v, state = node.src[2], node.src[5]
    if not (packed(state) and state.type is F32):
        return False
    n = state.ne[0] * state.ne[1] * state.ne[2]
    new = behind(node, v.numel, n, v.ne[3])
    return _delta(emit, node, (shaped(state, (n, v.ne[3], 1, 1)), *NOTHING), (new, *NOTHING), False)


def _enter_in_place(name: str, steps: Callable[[Emit, Tensor, Sequence[Field], Sequence[Field], bool], bool], outputs: int,
                    n: int) -> None:
    """Runs that read a state, compute, and write `n` states; source number `outputs` is as large as the outputs."""
    @lowers("get_rows", name, *["set_rows"] * n, chained=False)
    def lower(emit: Emit, get_rows: Tensor, node: Tensor, *sets: Tensor) -> bool:
        cache, rows = get_rows.src
        read = node.src[-1].root is get_rows and emit.readers(get_rows) == [node] and row_numbers(rows) and f32_rows(cache)
        new = stored(emit.readers(node), node, node.src[outputs].numel, sets) if read else None
        return new is not None and steps(emit, node, (cache, rows), new, True)


for _n in SNAPSHOTS:
    _enter_in_place("gated_delta_net", _delta, 2, _n)


# The selective scan.

def _scan_steps(emit: Emit, node: Tensor, new: Sequence[Field], to_rows: bool) -> bool:
    s, x, dt, a, b, c, ids = node.src
    d_state, dim, n_head = (int(n) for n in s.ne[:3])
    if d_state % 16 or not (f32_rows(x, dt, a, b, c) and packed(s) and row_numbers(ids)):
        return False
    per_channel = int(a.ne[0]) > 1
    kernel = _scan(d_state // 16, 1 if per_channel or dim % 16 else 16, int(per_channel), int(to_rows))
    states = shaped(s, (d_state * dim * n_head, s.ne[3], 1, 1))
    emit(kernel, node, x, *mapped(emit, "softplus", dt), a, b, c, states, ids, *new, node.params["n_snapshots"])
    return True


@lowers("ssm_scan")
def ssm_scan(emit: Emit, node: Tensor) -> bool:
    s, x = node.src[:2]
    new = behind(node, x.numel, s.ne[0] * s.ne[1] * s.ne[2], x.ne[3])
    return _scan_steps(emit, node, (new, *NOTHING), False)


def _enter_scan_in_place(n: int) -> None:
    @lowers("ssm_scan", *["set_rows"] * n, chained=False)
    def lower(emit: Emit, node: Tensor, *sets: Tensor) -> bool:
        new = stored(emit.readers(node), node, node.src[1].numel, sets)
        return new is not None and _scan_steps(emit, node, new, True)


for _n in SNAPSHOTS:
    _enter_scan_in_place(_n)


# Linear attention.

def _linear_steps(emit: Emit, node: Tensor, old: Sequence[Field], new: Sequence[Field], in_place: bool) -> bool:
    *sources, state = node.src
    d = int(sources[0].ne[0])
    if d % 16 or not f32_rows(*sources):
        return False
    fields = [*sources, *(6 - len(sources)) * NOTHING]
    emit(_linear(node.op, d // 16, int(in_place)), node, *old, *new, *fields, float(node.params.get("scale", 1.0)), state.ne[1])
    return True


def _enter_linear(name: str) -> None:
    @lowers(name)
    def lower(emit: Emit, node: Tensor) -> bool:
        first, state = node.src[0], node.src[-1]
        if not (packed(state) and state.type is F32):
            return False
        shape = (state.ne[0], state.ne[1])
        new = Tensor("view", F32, shape, (node,), view_src=node.root, view_offs=node.view_offs + F32.nbytes * first.numel)
        return _linear_steps(emit, node, (state, *NOTHING), (new, *NOTHING), False)


for _name in ("rwkv_wkv6", "rwkv_wkv7", "gated_linear_attn"):
    _enter_linear(_name)
    _enter_in_place(_name, _linear_steps, 0, 1)


# Causal convolution.

@lowers("ssm_conv")
def ssm_conv(emit: Emit, node: Tensor) -> bool:
    x, kernel = node.src
    rows = as_rows(emit, x, "convolution")
    if rows is None or not f32_rows(kernel):
        return False
    emit(_conv(), node, *rows, kernel)
    return True


def _going_on(emit: Emit, run: Sequence[Tensor], n: int, act: str, bias: Tensor | None = None) -> bool:
    """A run of `history` (with n copies of the last inputs) and what follows it."""
    get_rows, concat = run[0], run[2 if n > 1 else 1]
    kept, (conv, *_), last = run[2 + (n > 1):2 + (n > 1) + 2 * n], run[2 + (n > 1) + 2 * n:], run[-1]
    conts, sets, rows = kept[::2], kept[1::2], rows_of(kept[1::2])
    kernel, (old, numbers) = conv.src[1], get_rows.src
    x, d_conv = concat.src[1].src[0], int(kernel.ne[0])
    linked = (rows is not None and goes_on(emit.readers, concat, run[1] if n > 1 else get_rows, conv, conts, sets)
              and (n == 1 or (run[1].src[0].root is get_rows and emit.readers(get_rows) == [run[1]])))
    fits = (2 <= d_conv <= 4 and int(x.ne[0]) % 16 == 0 and packed(kernel) and kernel.type is F32
            and f32_rows(x, old, sets[0].src[0]) and row_numbers(numbers)
            and (bias is None or (f32_rows(bias) and int(bias.ne[0]) == int(x.ne[0]))))
    if rows is None or not (linked and fits and apart(last, x)):
        return False
    emit(_conv_going_on(d_conv, int(bias is not None), act), last, x, kernel, *(NOTHING if bias is None else (bias,)), old, numbers,
         sets[0].src[0], rows, n)
    return True


def _enter_conv(n: int) -> None:
    history = ("get_rows", *["pad"] * (n > 1), "concat", *["cont", "set_rows"] * n, "ssm_conv")

    @lowers(*history, chained=False)
    def plain(emit: Emit, *run: Tensor) -> bool:
        return _going_on(emit, run, n, "none")

    @lowers(*history, "silu", chained=False)
    def with_silu(emit: Emit, *run: Tensor) -> bool:
        conv, silu = run[-2:]
        return silu.src[0] is conv and emit.readers(conv) == [silu] and _going_on(emit, run, n, "silu")

    @lowers(*history, "add", "silu", chained=False)
    def with_bias(emit: Emit, *run: Tensor) -> bool:
        conv, add, silu = run[-3:]
        return (add.src[0] is conv and emit.readers(conv) == [add] and silu.src[0] is add and emit.readers(add) == [silu]
                and _going_on(emit, run, n, "silu", add.src[1]))


for _n in SNAPSHOTS:
    _enter_conv(_n)
