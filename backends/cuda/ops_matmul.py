"""Lowerings of matrix products: 8-bit activations times quantized weights, and products of plain types."""
from __future__ import annotations

from ggraph import dtypes
from ggraph.tensor import Tensor

from .device import Kernel
from .layout import f32, in_rows, plain
from .lower import Blocks, Emit, Scratch, lowers
from .ops_move import typed, unpackable

WARPS = 4                   # rows of a block of the mat-vec kernels
TILE = 64                   # rows and columns of a block of the mat-mul kernels
FEW = 8                     # columns up to which weights are read once for all columns


def quantized(emit: Emit, x: Tensor) -> tuple[Scratch, Scratch]:
    """(bytes, scales) of x as 8-bit activations, made once for all products that follow one another."""
    n = int(x.numel)
    q, held = emit.scratch("activations", n, x)
    scales, _ = emit.scratch("scales", n // 32 * 8, x)
    if not held:
        n_rows = x.ne[1] * x.ne[2] * x.ne[3]
        emit(Kernel("activation", "quantize"), x, q, scales, x.type.id, grid=(Blocks(x.ne[0], 128), n_rows), block=128)
    return q, scales


@lowers("mul_mat")
def mul_mat(emit: Emit, node: Tensor) -> bool:
    a, b = node.src
    if a.type.quantized:
        return _quantized(emit, node, a, b)
    return plain(a, b) and _float(emit, node, a, b)


def _quantized(emit: Emit, node: Tensor, a: Tensor, b: Tensor) -> bool:
    if not (unpackable(a.type) and in_rows(a) and plain(b)):
        return False
    q, scales = quantized(emit, b)
    n, m, b2, b3 = a.ne[1], node.ne[1], node.ne[2], node.ne[3]
    least = 1
    for columns in (1, 2, 4, FEW):
        with emit.when(m, least, columns):
            emit(typed("matvec", f"matvec_{columns}", a.type), node, a, q, scales, grid=(Blocks(n, WARPS), b2, b3),
                 block=128)
        least = columns + 1
    with emit.when(m, least):
        emit(typed("matmul", "matmul", a.type), node, a, q, scales, grid=(Blocks(n, TILE), Blocks(m, TILE), b2 * b3))
    return True


def _float(emit: Emit, node: Tensor, a: Tensor, b: Tensor) -> bool:
    n, m, b2, b3 = a.ne[1], node.ne[1], node.ne[2], node.ne[3]
    least = 1
    for columns in (1, 4, FEW):
        with emit.when(m, least, columns):
            emit(typed("matfloat", f"matvec_{columns}", a.type), node, a, b, b.type.id, grid=(Blocks(n, WARPS), b2, b3), block=128)
        least = columns + 1
    with emit.when(m, least):
        emit(typed("matfloat", "matmul", a.type), node, a, b, b.type.id, grid=(Blocks(n, TILE), Blocks(m, TILE), b2 * b3))
    return True


@lowers("mul_mat_id")
def mul_mat_id(emit: Emit, node: Tensor) -> bool:
    a, b, ids = node.src
    grid = (Blocks(a.ne[1], WARPS), node.ne[1], node.ne[2])
    if a.type.quantized:
        if not (unpackable(a.type) and in_rows(a) and plain(b)):
            return False
        q, scales = quantized(emit, b)
        emit(typed("matvec", "matvec_id", a.type), node, a, ids, q, scales, b.ne[1], grid=grid, block=128)
        return True
    emit(typed("matfloat", "matvec_id", a.type), node, a, b, ids, b.type.id, grid=grid, block=128)
    return plain(a, b)


@lowers("out_prod")
def out_prod(emit: Emit, node: Tensor) -> bool:
    a, b = node.src
    emit(typed("matfloat", "out_prod", a.type), node, a, b, b.type.id, grid=(Blocks(node.numel, 256),))
    return plain(a, b)


@lowers("solve_tri")
def solve_tri(emit: Emit, node: Tensor) -> bool:
    a, b = node.src
    emit(typed("matfloat", "solve_tri", dtypes.F32), node, a, b, grid=(Blocks(node.ne[0], 64), node.ne[2], node.ne[3]), block=64)
    return f32(a, b)
