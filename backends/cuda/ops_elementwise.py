"""Ops that work element by element, alone and in chains: one launch for several, its result as its readers want it."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ggraph.ops import UNARY
from ggraph.tensor import Tensor

from ..lowering import apart
from .activation import wanted, wish
from .device import Kernel
from .flow import Flow
from .layout import elements, f32, plain
from .lower import Emit, Fusion, fuses, lowers

BINARY = {name: 200 + i for i, name in enumerate(("add", "sub", "mul", "div"))}
SINGLE = {**{name: i for i, name in enumerate(UNARY)}, "scale": 100, "clamp": 101}
STEPS = 6                   # of a chain
AS_IT_IS = 102              # the op that does nothing


class Step(NamedTuple):
    """The struct Step of kernels/elementwise.cu."""
    op: int
    a: float = 0.0
    b: float = 0.0
    type: int = 0
    swapped: int = 0
    other: Tensor | None = None


def _step(node: Tensor, x: Tensor) -> Step | None:
    """What a node does to x, one of its sources."""
    p = node.params
    if node.op == "scale":
        return Step(SINGLE["scale"], float(p["s"]), float(p["bias"]))
    if node.op == "clamp":
        return Step(SINGLE["clamp"], float(p["lo"]), float(p["hi"]))
    if node.op in SINGLE:
        return Step(SINGLE[node.op])
    a, b = node.src
    other = b if a is x else a
    fits = plain(other) and x.ne == node.ne and not (a is x and b is x)
    return Step(BINARY[node.op], 0.0, 0.0, other.type.id, int(a is not x), other) if fits else None


def _chain(emit: Emit, nodes: Sequence[Tensor], x: Tensor, steps: list[Step]) -> None:
    """x is what the first node reads."""
    node = nodes[-1]
    how = wish(emit.flow, node, tuple(nodes))
    rest = [Step(AS_IT_IS)] * (STEPS - len(steps))
    emit(Kernel("elementwise", "chain"), node, x, x.type.id, (len(steps), *steps, *rest), int(how.floats), *wanted(emit, node, how),
         grid=elements(node))


def _alone(emit: Emit, node: Tensor) -> bool:
    x = node.src[0]
    step = Step(BINARY[node.op], 0.0, 0.0, x.type.id, 0, x) if node.op in BINARY and x is node.src[1] else _step(node, x)
    if step is None or not (f32(node) and plain(x)):
        return False
    _chain(emit, [node], x, [step])
    return True


for _name in (*SINGLE, *BINARY):
    lowers(_name)(_alone)


@fuses("cont", *SINGLE, *BINARY)
def chain(flow: Flow, node: Tensor) -> Fusion | None:
    """Each op's result is read by the next alone; a copy may begin it."""
    x = node.src[0]
    first = Step(AS_IT_IS) if node.op == "cont" else _step(node, x)
    if first is None or not f32(node, x):
        return None
    nodes, steps = [node], [first]
    while len(nodes) < STEPS and (after := flow.next(nodes[-1], *SINGLE, *BINARY)) is not None and nodes[-1] in after.src:
        step = _step(after, nodes[-1])
        taken = [x, *(s.other for s in (*steps, *([step] if step else ())) if s.other is not None)]
        if step is None or not (f32(after) and after.ne == node.ne and apart(after, *taken) and flow.can_run(*nodes, after)):
            break
        nodes.append(after)
        steps.append(step)
    return Fusion(tuple(nodes), lambda emit: _chain(emit, nodes, x, steps)) if len(nodes) > 1 else None


@lowers("add_id")
def add_id(emit: Emit, node: Tensor) -> bool:
    emit(Kernel("elementwise", "add_id"), node, *node.src, grid=elements(node))
    return f32(node, *node.src[:2])
