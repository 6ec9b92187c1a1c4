"""Lowerings of ops that work element by element."""
from __future__ import annotations

from ggraph.ops import UNARY
from ggraph.tensor import Tensor

from .device import Kernel
from .layout import elements, f32, plain
from .lower import Emit, lowers

BINARY = ("add", "sub", "mul", "div")


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


for _number in range(len(UNARY)):
    unary(_number)
for _number in range(len(BINARY)):
    binary(_number)
