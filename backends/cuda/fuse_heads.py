"""What stands between the products for Q, K and V and the attention, as one launch.

    [norm [mul]] [rope] [hadamard] of Q and K, [hadamard] of V, set_rows of K and V into their caches

The pattern is found from the attention backwards; every step is optional but the writing.
"""
from __future__ import annotations

from typing import NamedTuple

from ggraph.tensor import Tensor

from ..lowering import apart, disjoint
from .device import Kernel
from .flow import Flow
from .layout import f32, threads
from .lower import Arg, Emit, Fusion, fuses
from .ops_attention import c_type, cached
from .ops_rope import parameters

STEPS = ("hadamard", "rope", "mul", "rms_norm")                 # backwards


class Heads(NamedTuple):
    """`x` [head, n_head, n_tokens] before all steps, which are `nodes`."""
    x: Tensor
    nodes: tuple[Tensor, ...] = ()

    def find(self, op: str) -> Tensor | None:
        return next((n for n in self.nodes if n.op == op), None)

    @property
    def weight(self) -> Tensor | None:
        mul = self.find("mul")
        return mul.src[1] if mul is not None else None

    @property
    def args(self) -> tuple[Arg, ...]:
        """The struct Heads of kernels/heads.cu."""
        norm, turned, rotated = (self.find(op) for op in ("rms_norm", "rope", "hadamard"))
        n = rotated.params["n"] if rotated is not None else 0
        return (int(norm is not None), float(norm.params["eps"]) if norm is not None else 0.0, int(turned is not None), n,
                float(n ** -0.5) if n else 0.0)


@fuses(*STEPS, "set_rows")
def heads(flow: Flow, node: Tensor) -> Fusion | None:
    attention = next((n for n in flow.ahead() if n.op == "flash_attn_ext"), None)
    if attention is None:
        return None
    k_cells, v_cells = _store(flow, attention.src[1]), _store(flow, attention.src[2])
    if k_cells is None or v_cells is None or k_cells is v_cells:
        return None
    q = _heads(flow, attention.src[0], attention, attention.src[0])
    k = _heads(flow, k_cells.src[1], k_cells, attention.src[1])
    v = _heads(flow, v_cells.src[1], v_cells, attention.src[2])
    nodes = (*q.nodes, *k.nodes, *v.nodes, k_cells, v_cells)
    if node not in nodes or not _fits(q, k, v, k_cells, v_cells) or not flow.can_run(*nodes):
        return None
    return Fusion(nodes, lambda emit: _emit(emit, q, k, v, k_cells, v_cells))


def _store(flow: Flow, cells: Tensor) -> Tensor | None:
    """What writes the cells that the attention reads, and is still to run."""
    return next((n for n in flow.ahead() if n.op == "set_rows" and n.root is cells.root and cached(cells)), None)


def _heads(flow: Flow, last: Tensor, reader: Tensor, seen: Tensor) -> Heads:
    """Back from `last`, all of a node's heads, which `reader` reads; `seen` is the same, or K or V, as the attention reads it:
    [head, .., n_head]."""
    found: list[Tensor] = []
    d, n_head = seen.ne[0], seen.ne[2]
    x = last.root if last.numel == last.root.numel and last.root.contiguous and last.root.ne[:2] == (d, n_head) else last
    for op in STEPS:
        step = x.op == op and x in flow.order and x not in flow.done and flow.next(x, reader.op) is reader
        if step and (op != "mul" or x.src[0].op == "rms_norm"):
            found, reader, x = [x, *found], x, x.src[0]
    if not found:
        x = Tensor("view", last.type, (d, n_head, last.ne[1]), (last,), nb=(last.nb[0], d * last.nb[0], last.nb[1]),
                   view_src=last.root, view_offs=last.view_offs)
    return Heads(x, tuple(found))


def _fits(q: Heads, k: Heads, v: Heads, k_cells: Tensor, v_cells: Tensor) -> bool:
    parts = [part for part in (q, k, v) if part is not q or q.nodes]
    ropes = [r for part in parts if (r := part.find("rope")) is not None]
    whole = all(part.x.ne[3] == 1 and f32(part.x, part.weight) and all(n.contiguous for n in part.nodes) for part in parts)
    weights = all(part.weight is None or part.weight.numel == part.x.ne[0] for part in parts)
    clear = not q.nodes or (apart(q.nodes[-1], q.x) and disjoint(q.nodes[-1], k.x) and disjoint(q.nodes[-1], v.x))
    plain_v = v.find("rope") is None and v.find("rms_norm") is None
    alike = all(r.src[1:] == ropes[0].src[1:] and r.params == ropes[0].params for r in ropes)
    return (whole and weights and clear and plain_v and alike
            and k_cells.src[2] is v_cells.src[2] and k_cells.src[2].ne[1] == 1)


def _emit(emit: Emit, q: Heads, k: Heads, v: Heads, k_cells: Tensor, v_cells: Tensor) -> None:
    rope = q.find("rope") or k.find("rope")
    turn = (*rope.src[1:3], parameters(rope)) if rope is not None else (None, None, (0,) * 13)
    of_q = (q.nodes[-1], q.x, q.weight) if q.nodes else (None, None, None)
    n_head = (q.x.ne[1] if q.nodes else 0) + k.x.ne[1] + v.x.ne[1]
    d = max(int(k.x.ne[0]), int(v.x.ne[0]))
    types = (("K_TYPE", c_type(k_cells.type)), ("V_TYPE", c_type(v_cells.type)))
    emit(Kernel("heads", "heads", types), *of_q, q.args, k_cells, k.x, k.weight, k.args, v_cells, v.x, v.args,
         k_cells.src[2], *turn, grid=(k.x.ne[2], n_head), block=threads(k.x.ne[0]), shared=4 * d)
