"""Recurrent layers with their state rows, read and written where they are kept.

    get_rows [pad] concat (cont set_rows).. ssm_conv [add] [silu]               -> the convolution, for all sizes
    [rms_norm scale] of q and k, [sigmoid] of beta, [add softplus mul] of the   -> the gated delta rule, for few tokens
    gate, get_rows gated_delta_net set_rows..
    [add] of dt, ssm_scan set_rows..                                            -> the selective scan
"""
from __future__ import annotations

from typing import NamedTuple

from ggraph.tensor import Tensor

from ..lowering import disjoint, packed
from ..states import goes_on, row_numbers, rows_of, stored
from .device import Kernel
from .flow import Flow
from .layout import f32
from .lower import Blocks, Emit, Fusion, fuses
from .ops_recurrent import MAX_STATE, lanes, scan

CHUNK = 32                  # tokens of a thread of the convolution
MAX_TAPS = 8
FEW = 8                     # tokens of a sequence up to which the delta rule takes in what stands around it


# --- convolution

@fuses("get_rows")
def convolution(flow: Flow, get_rows: Tensor) -> Fusion | None:
    pad = flow.next(get_rows, "pad")
    before = pad if pad is not None else get_rows
    concat = flow.next(before, "concat")
    readers = flow.readers.of(concat) if concat is not None else None
    conv = next((r for r in readers or () if r.op == "ssm_conv"), None)
    if concat is None or conv is None or concat.src[1].op != "transpose":
        return None
    conts = [r for r in readers or () if r.op == "cont"]
    sets = [s for c in conts if (s := flow.next(c, "set_rows")) is not None]
    if not sets or len(sets) != len(conts) or not goes_on(flow.readers.of, concat, before, conv, conts, sets):
        return None
    rows, x, kernel, (cells, ids) = rows_of(sets), concat.src[1].src[0], conv.src[1], get_rows.src
    bias, act, tail = _behind(flow, conv)
    nodes = (*dict.fromkeys((get_rows, before)), concat, *conts, *sets, *tail)
    fits = (rows is not None and f32(x, kernel, cells, bias, *tail) and kernel.ne[0] <= MAX_TAPS and row_numbers(ids)
            and disjoint(tail[-1], x) and cells.nb[0] == 4 and flow.can_run(*nodes))
    return Fusion(nodes, lambda emit: emit(
        Kernel("conv", "conv_going_on"), tail[-1], x, kernel, bias, cells, ids, sets[0].src[0], rows, int(act),
        grid=(Blocks(x.ne[0], 128), Blocks(x.ne[1], CHUNK), x.ne[2]), block=128)) if fits else None


def _behind(flow: Flow, conv: Tensor) -> tuple[Tensor | None, bool, tuple[Tensor, ...]]:
    """(bias, whether silu follows, the convolution and those two)"""
    nodes: tuple[Tensor, ...] = (conv,)
    bias = None
    add = flow.next(conv, "add")
    if add is not None and add.src[0] is conv and add.src[1].numel == conv.ne[0]:
        nodes, bias = (conv, add), add.src[1]
    silu = flow.next(nodes[-1], "silu")
    if silu is not None and silu.src[0] is nodes[-1]:
        return bias, True, (*nodes, silu)
    return bias, False, nodes


# --- the selective scan

@fuses("add", "ssm_scan")
def selective(flow: Flow, node: Tensor) -> Fusion | None:
    rule = next((n for n in flow.ahead() if n.op == "ssm_scan"), None)
    if rule is None:
        return None
    s, x, dt = rule.src[:3]
    add = dt.root
    biased = _only(flow, add, "add", rule) and packed(dt) and add.src[1].numel == dt.ne[0] and add.src[0].ne == add.ne
    sets = [r for r in flow.readers.of(rule) or () if r.op == "set_rows"]
    new = stored(flow.readers.of(rule), rule, x.numel, sets) if sets else None
    nodes = (*((add,) if biased else ()), rule, *sets)
    if new is None or node not in nodes or int(s.ne[0]) > MAX_STATE or not flow.can_run(*nodes):
        return None
    seen, bias = (_by_seq(add.src[0], dt), add.src[1]) if biased else (dt, None)
    fits = f32(*rule.src[:6], seen, bias) and disjoint(rule, seen)
    return Fusion(nodes, lambda emit: scan(emit, rule, seen, bias, new)) if fits else None


def _by_seq(x: Tensor, shaped: Tensor) -> Tensor:
    """x [n, n_tokens of all sequences], rows of any stride, in the shape [n, n_tokens, n_seqs]; or as it is."""
    if x.ne[2] > 1:
        return x
    return Tensor("view", x.type, shaped.ne, (x,), nb=(x.nb[0], x.nb[1], x.nb[1] * shaped.ne[1]), view_src=x.root,
                  view_offs=x.view_offs)


# --- the gated delta rule

class Source(NamedTuple):
    """What the kernel reads for a source of the delta rule, and the nodes that it takes over."""
    x: Tensor
    nodes: tuple[Tensor, ...] = ()
    eps: float = 0.0
    factor: float = 1.0
    more: tuple[Tensor | None, ...] = ()


@fuses("rms_norm", "add", "softplus", "sigmoid", "scale", "get_rows", "gated_delta_net")
def delta(flow: Flow, node: Tensor) -> Fusion | None:
    rule = next((n for n in flow.ahead() if n.op == "gated_delta_net"), None)
    if rule is None:
        return None
    q, k = (_normed(flow, x, rule) for x in rule.src[:2])
    v, gate, beta, load = rule.src[2], _gate(flow, rule), _sigmoid(flow, rule), rule.src[5].root
    sets = [r for r in flow.readers.of(rule) or () if r.op == "set_rows"]
    new = stored(flow.readers.of(rule), rule, v.numel, sets) if sets else None
    if new is None or load.op != "get_rows" or load in flow.done or flow.next(load, rule.op) is None:
        return None
    cells, ids = load.src
    nodes = (*q.nodes, *k.nodes, *gate.nodes, *beta.nodes, load, rule, *sets)
    tensors = [t for t in (q.x, k.x, v, gate.x, beta.x, *gate.more) if t is not None]
    fits = (node in nodes and f32(*tensors, cells) and row_numbers(ids) and cells.nb[0] == 4 and int(v.ne[0]) <= MAX_STATE
            and all(disjoint(rule, t) for t in tensors) and flow.can_run(*nodes))

    def emit_delta(emit: Emit) -> None:
        around = q.eps, q.factor, k.eps, k.factor, int(bool(gate.nodes)), int(bool(beta.nodes))
        with emit.when(v.ne[2], 1, FEW):
            emit(Kernel("delta", "delta_going_on", lanes(v.ne[0])), rule, q.x, k.x, v, gate.x, beta.x,
                 *(gate.more or (None, None)), around, cells, ids, *new, grid=(Blocks(v.ne[0], 4), v.ne[1], v.ne[3]), block=128)
        with emit.when(v.ne[2], FEW + 1):
            emit.alone(*nodes)
    return Fusion(nodes, emit_delta) if fits else None


def _only(flow: Flow, x: Tensor, op: str, reader: Tensor) -> bool:
    return x.op == op and x in flow.order and x not in flow.done and flow.next(x, reader.op) is reader


def _normed(flow: Flow, x: Tensor, rule: Tensor) -> Source:
    """Q or K: a norm by RMS times a number."""
    if _only(flow, x, "scale", rule) and x.params["bias"] == 0 and _only(flow, x.src[0], "rms_norm", x):
        norm = x.src[0]
        return Source(norm.src[0], (norm, x), float(norm.params["eps"]), float(x.params["s"]))
    return Source(x)


def _sigmoid(flow: Flow, rule: Tensor) -> Source:
    beta = rule.src[4]
    return Source(beta.src[0], (beta,)) if _only(flow, beta, "sigmoid", rule) else Source(beta)


def _gate(flow: Flow, rule: Tensor) -> Source:
    """softplus(x + dt) a of each head, seen as [1, n_head, n_tokens, n_seqs]."""
    g = rule.src[3]
    mul, n_head = g.root, g.ne[1]
    if not (g.ne[0] == 1 and packed(g) and _only(flow, mul, "mul", rule) and mul.ne[0] == n_head == mul.src[1].numel
            and _only(flow, mul.src[0], "softplus", mul)):
        return Source(g)
    soft = mul.src[0]
    add = soft.src[0]
    if not (_only(flow, add, "add", soft) and add.src[1].numel == n_head and packed(add.src[0]) and add.src[0].ne == add.ne):
        return Source(g)
    x = add.src[0]
    seen = Tensor("view", x.type, g.ne, (x,), view_src=x.root, view_offs=x.view_offs)
    return Source(seen, (add, soft, mul), more=(add.src[1], mul.src[1]))
