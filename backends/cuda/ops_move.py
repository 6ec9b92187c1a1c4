"""Lowerings of ops that move data: copies, casts, rows by number, new shapes."""
from __future__ import annotations

from ggraph import dtypes
from ggraph.dtypes import DType
from ggraph.tensor import Tensor

from .activation import unpackable
from .device import Kernel
from .layout import PACKED, PLAIN, bits, elements, f32, in_rows
from .lower import Blocks, Emit, lowers

MOVED = (*PLAIN, dtypes.I32)


def typed(file: str, name: str, type: DType) -> Kernel:
    return Kernel(file, name, (("TYPE", type.name),))


def copy(emit: Emit, dst: Tensor, x: Tensor) -> bool:
    """x in the shape and type of dst."""
    if dst.type in MOVED and x.type in MOVED:
        same = dst.type is x.type
        emit(Kernel("move", "copy"), dst, x, bits(dst) if same else dst.type.id, bits(x) if same else x.type.id, grid=elements(dst))
        return True
    if dst.type is x.type:
        a, b = in_blocks(dst), in_blocks(x)
        emit(Kernel("move", "copy_blocks"), a, b, dst.type.nbytes, grid=elements(a))
        return True
    if dst.type in PACKED and x.type in MOVED:
        emit(typed("pack", "pack", dst.type), dst, x, x.type.id, grid=(Blocks(dst.numel, 32 * 64),), block=64)
        return in_rows(dst)
    if dst.type is dtypes.F32 and x.type.quantized:
        emit(typed("unpack", "unpack", x.type), dst, x, grid=(Blocks(x.numel, 32 * 64),), block=64)
        return dst.contiguous and in_rows(x) and unpackable(x.type)
    return False


def in_blocks(x: Tensor) -> Tensor:
    """The same bytes, with blocks as elements."""
    seen = Tensor("view", x.type, x.ne, (x,), nb=x.nb, view_src=x.root, view_offs=x.view_offs)
    seen.ne = (x.ne[0] // x.type.block, *x.ne[1:])
    return seen


@lowers("cont")
def cont(emit: Emit, node: Tensor) -> bool:
    return copy(emit, node, node.src[0])


@lowers("cast")
def cast(emit: Emit, node: Tensor) -> bool:
    return copy(emit, node, node.src[0])


@lowers("cpy")
def cpy(emit: Emit, node: Tensor) -> bool:
    return copy(emit, node, node.src[0])


@lowers("get_rows")
def get_rows(emit: Emit, node: Tensor) -> bool:
    x, ids = node.src
    if x.type in MOVED:
        emit(Kernel("move", "get_rows"), node, x, ids, bits(x), grid=elements(node))
        return True
    n_rows = node.ne[1] * node.ne[2] * node.ne[3]
    emit(typed("unpack", "get_rows", x.type), node, x, ids, grid=(Blocks(x.ne[0], 32 * 64), n_rows), block=64)
    return unpackable(x.type) and in_rows(x)


@lowers("set_rows")
def set_rows(emit: Emit, node: Tensor) -> bool:
    _, x, ids = node.src
    if node.type in MOVED:
        emit(Kernel("move", "set_rows"), node, x, ids, node.type.id, x.type.id, grid=elements(x))
        return x.type in PLAIN or x.type is node.type
    emit(typed("pack", "set_rows", node.type), node, x, ids, x.type.id, grid=(Blocks(x.numel, 32 * 64),), block=64)
    return node.type in PACKED and in_rows(node) and x.type in PLAIN


@lowers("concat")
def concat(emit: Emit, node: Tensor) -> bool:
    a, b = node.src
    emit(Kernel("move", "concat"), node, a, b, node.params["axis"], bits(node), grid=elements(node))
    return node.type in MOVED


@lowers("repeat")
def repeat(emit: Emit, node: Tensor) -> bool:
    emit(Kernel("move", "repeat"), node, node.src[0], bits(node), grid=elements(node))
    return node.type in MOVED


@lowers("pad")
def pad(emit: Emit, node: Tensor) -> bool:
    emit(Kernel("move", "pad"), node, node.src[0], *node.params["left"], grid=elements(node))
    return f32(node.src[0])


@lowers("roll")
def roll(emit: Emit, node: Tensor) -> bool:
    emit(Kernel("move", "roll"), node, node.src[0], *node.params["shifts"], grid=elements(node))
    return f32(node.src[0])


@lowers("fill")
def fill(emit: Emit, node: Tensor) -> bool:
    emit(Kernel("move", "arange"), node, float(node.params["value"]), 0.0, grid=elements(node))
    return True


@lowers("arange")
def arange(emit: Emit, node: Tensor) -> bool:
    emit(Kernel("move", "arange"), node, float(node.params["start"]), float(node.params["step"]), grid=elements(node))
    return True


@lowers("diag")
def diag(emit: Emit, node: Tensor) -> bool:
    emit(Kernel("move", "diag"), node, node.src[0], grid=elements(node))
    return f32(node.src[0])


@lowers("tri")
def tri(emit: Emit, node: Tensor) -> bool:
    emit(Kernel("move", "tri"), node, node.src[0], int(node.params["lower"]), int(node.params["diag"]), grid=elements(node))
    return f32(node.src[0])
