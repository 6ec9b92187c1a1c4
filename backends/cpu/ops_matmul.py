"""Lowering of matrix products with packed weights. Activations that several products read are quantized once.

In: mul_mat and mul_mat_id nodes. Out: steps, or False where the weight has no panels.
"""
from __future__ import annotations

from ggraph.tensor import F32, Tensor

from . import activation, matmul
from .lower import Emit, Scratch, lowers


@lowers("mul_mat")
def mul_mat(emit: Emit, node: Tensor) -> bool:
    a, b = node.src
    assert a is not None and b is not None
    if a.op != "none" or a.ne[2] * a.ne[3] != 1 or b.type is not F32 or b.nb[0] != 4:
        return False
    panels = emit.panels(a)
    if panels is None:
        return False
    tiles = activation_tiles(emit, a, b)
    emit(matmul.matmul_kernel(a.type), node, tiles, panels, a.ne[0])
    return True


def activation_tiles(emit: Emit, weight: Tensor, x: Tensor) -> Scratch:
    """x as tiles for products with `weight`, made unless the last such step left them there."""
    quantized = matmul.quantized(weight.type)
    n_tokens = x.ne[1] * x.ne[2] * x.ne[3]
    tiles, ready = emit.scratch(("tiles", quantized), int(activation.nbytes(quantized, x.ne[0], n_tokens)), x)
    if not ready:
        emit(activation.activation_kernel(quantized), x, tiles)
    return tiles
