"""Norms, and the fusions that begin with one: times a weight, plus a bias or the residual, the next norm, 8-bit activations.

    rms_norm mul                        -> a norm of a pre-norm model
    rms_norm mul silu mul               -> with a gate (delta nets)
    rms_norm mul add                    -> with a bias, or the residual behind a norm
    add rms_norm mul                    -> the residual, where no product could take it
    rms_norm mul add rms_norm mul       -> between the blocks of a model with norms on both sides (gemma)
"""
from __future__ import annotations

from typing import NamedTuple

from ggraph.ops import UNARY
from ggraph.tensor import Tensor

from ..lowering import apart
from .activation import NOWHERE, Bytes, wanted, wish
from .device import Kernel
from .flow import Flow
from .layout import f32, rows, same, threads
from .lower import Emit, Fusion, fuses, lowers

NORMS = {"norm": 0, "rms_norm": 1, "l2_norm": 2}
AS_IT_IS = 3
NO_GATE: tuple[int, Tensor | None] = (0, None)


class Stage(NamedTuple):
    """A norm with what follows it: `dst` is the last node."""
    nodes: tuple[Tensor, ...]
    x: Tensor
    kind: tuple[int, float]
    weight: Tensor | None = None
    plus: Tensor | None = None
    gate: tuple[int, Tensor | None] = NO_GATE

    @property
    def dst(self) -> Tensor:
        return self.nodes[-1]

    @property
    def sources(self) -> list[Tensor]:
        return [t for t in (self.x, self.weight, self.plus, self.gate[1]) if t is not None]


def _enter(name: str) -> None:
    @lowers(name)
    def lower(emit: Emit, node: Tensor) -> bool:
        _emit(emit, Stage((node,), node.src[0], _kind(node)), None, True)
        return f32(node, node.src[0])


for _name in NORMS:
    _enter(_name)


def _kind(node: Tensor) -> tuple[int, float]:
    return NORMS[node.op], float(node.params["eps"])


def _emit(emit: Emit, stage: Stage, after: Stage | None, floats: bool, place: Bytes = NOWHERE) -> None:
    second = (after.dst, after.weight, after.kind) if after else (None, None, (AS_IT_IS, 0.0))
    emit(Kernel("norm", "normalize"), stage.dst, stage.x, stage.weight, stage.gate, stage.plus, stage.kind, *second, int(floats),
         *place, grid=rows(stage.dst), block=threads(stage.dst.ne[0]))


@fuses(*NORMS)
def normed(flow: Flow, node: Tensor) -> Fusion | None:
    stage = _stage(flow, node)
    return _fusion(flow, stage) if stage else None


@fuses("add")
def added(flow: Flow, node: Tensor) -> Fusion | None:
    """A sum whose norm is next."""
    a, b = node.src
    if not (f32(node, a, b) and node.ne == a.ne == b.ne and apart(node, a, b)):
        return None
    fusion = _fusion(flow, Stage((node,), a, (AS_IT_IS, 0.0), plus=b))
    return fusion if fusion and len(fusion.nodes) > 1 else None


def _stage(flow: Flow, node: Tensor, before: tuple[Tensor, ...] = ()) -> Stage | None:
    """A norm, times a weight, plus something unless there is a stage `before`."""
    nodes, weight, plus, gate = [node], None, None, NO_GATE
    mul = flow.next(node, "mul")
    if mul is not None and mul.src[0] is node and _row(mul.src[1], node):
        nodes, weight = [node, mul], mul.src[1]
        add = None if before else flow.next(mul, "add")
        if add is not None and mul in add.src and add.src[0] is not add.src[1]:
            other = add.src[1] if add.src[0] is mul else add.src[0]
            if same(add, node) and other.root is not node and _row(other, node) and flow.can_run(node, mul, add):
                nodes, plus = [node, mul, add], other
        elif not before and (gate_nodes := _gated(flow, mul)) and flow.can_run(node, mul, *gate_nodes):
            nodes, gate = [node, mul, *gate_nodes], (UNARY.index(gate_nodes[0].op), gate_nodes[0].src[0])
    stage = Stage(tuple(nodes), node.src[0], _kind(node), weight, plus, gate)
    fits = f32(*nodes, *stage.sources) and apart(stage.dst, *stage.sources) and flow.can_run(*before, *nodes)
    return stage if fits else None


def _gated(flow: Flow, mul: Tensor) -> tuple[Tensor, ...]:
    """(the activation of a gate, its product with what `mul` gives), where that is next."""
    product = flow.next(mul, "mul")
    act = product.src[1] if product is not None and product.src[0] is mul else None
    if product is None or act is None or act.op not in UNARY or flow.next(act, "mul") is not product or act in flow.done:
        return ()
    return (act, product) if act in flow.order and act.ne == product.ne == act.src[0].ne == mul.ne else ()


def _row(x: Tensor, norm: Tensor) -> bool:
    """x, which repeats over a norm's result, has whole rows."""
    return x.ne[0] == norm.ne[0]


def _fusion(flow: Flow, stage: Stage) -> Fusion | None:
    """With the norm of the result, if that is near."""
    after = _after(flow, stage)
    nodes = stage.nodes + (after.nodes if after else ())
    last = nodes[-1]
    how = wish(flow, last, nodes)
    if len(nodes) == 1 and not how.packed:
        return None
    return Fusion(nodes, lambda emit: _emit(emit, stage, after, how.floats, wanted(emit, last, how)))


def _after(flow: Flow, stage: Stage) -> Stage | None:
    y = stage.dst
    if stage.plus is None or not y.contiguous:
        return None
    for node in flow.readers.reads.get(y, []):
        if node.op in NORMS and node.src[0] is y:
            after = _stage(flow, node, stage.nodes)
            if after and apart(after.dst, y, *stage.sources):
                return after
    return None
