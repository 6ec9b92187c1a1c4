"""Lowerings of gated activations, alone."""
from __future__ import annotations

from ggraph.ops import GLU
from ggraph.tensor import Tensor

from .activation import wanted, wish
from .device import Kernel
from .layout import elements, f32
from .lower import Emit, lowers

NUMBERS = {**{name: i for i, name in enumerate(GLU)}, "swiglu_oai": 5, "swiglu_clamp": 6}


def parameters(node: Tensor) -> tuple[int, float, float]:
    """The struct Glu of kernels/glu.cuh."""
    return NUMBERS[node.op], float(node.params.get("alpha", 1.0)), float(node.params.get("limit", 0.0))


def activate(emit: Emit, node: Tensor) -> bool:
    """As products want it, where they read it."""
    how = wish(emit.flow, node, (node,))
    emit(Kernel("elementwise", "glu"), node, *node.src, parameters(node), int(how.floats), *wanted(emit, node, how),
         grid=elements(node))
    return f32(node, *node.src)


for _name in NUMBERS:
    lowers(_name)(activate)
