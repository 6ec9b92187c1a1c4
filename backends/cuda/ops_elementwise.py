"""Lowerings of ops that work element by element."""
from __future__ import annotations

from ggraph.ops import GLU, UNARY
from ggraph.tensor import Tensor

from .device import Kernel
from .layout import elements, f32, plain
from .lower import Emit, lowers

BINARY = ("add", "sub", "mul", "div")
LIMITED = {"swiglu_oai": 5, "swiglu_clamp": 6}


def unary(number: int) -> None:
    @lowers(UNARY[number])
    def lower(emit: Emit, node: Tensor) -> bool:
        emit(Kernel("elementwise", "unary"), node, node.src[0], number, 0.0, 0.0, grid=elements(node))
        return f32(node, node.src[0])


@lowers("scale")
def scale(emit: Emit, node: Tensor) -> bool:
    p = node.params
    emit(Kernel("elementwise", "unary"), node, node.src[0], 100, float(p["s"]), float(p["bias"]), grid=elements(node))
    return f32(node, node.src[0])


@lowers("clamp")
def clamp(emit: Emit, node: Tensor) -> bool:
    p = node.params
    emit(Kernel("elementwise", "unary"), node, node.src[0], 101, float(p["lo"]), float(p["hi"]), grid=elements(node))
    return f32(node, node.src[0])


def binary(number: int) -> None:
    @lowers(BINARY[number])
    def lower(emit: Emit, node: Tensor) -> bool:
        a, b = node.src
        emit(Kernel("elementwise", "binary"), node, a, b, a.type.id, b.type.id, number, grid=elements(node))
        return f32(node) and plain(a, b)


@lowers("add_id")
def add_id(emit: Emit, node: Tensor) -> bool:
    emit(Kernel("elementwise", "add_id"), node, *node.src, grid=elements(node))
    return f32(node, *node.src[:2])


def glu(name: str, number: int) -> None:
    @lowers(name)
    def lower(emit: Emit, node: Tensor) -> bool:
        alpha, limit = node.params.get("alpha", 1.0), node.params.get("limit", 0.0)
        emit(Kernel("elementwise", "glu"), node, *node.src, number, float(alpha), float(limit), grid=elements(node))
        return f32(node, *node.src)


for _number in range(len(UNARY)):
    unary(_number)
for _number in range(len(BINARY)):
    binary(_number)
for _name, _number in {**{name: i for i, name in enumerate(GLU)}, **LIMITED}.items():
    glu(_name, _number)
