"""Lowering of matrix products with packed weights. Activations that several products read are quantized once.

In: mul_mat and mul_mat_id nodes. Out: steps, or False where the weight has no panels.
"""
from __future__ import annotations

from ggraph.tensor import F32, Tensor

from ..lowering import Scratch
from . import activation, matmul, matmul_id
from .activation import Q8, Form
from .join import by_columns, by_tokens
from .lower import ONE_THREAD, Emit, lowers
from .ops_attention import flash_attn_ext, strided_mul_mat


@lowers("mul_mat")
def mul_mat(emit: Emit, node: Tensor) -> bool:
    a, b = node.src
    assert a is not None and b is not None
    fits = a.op == "none" and a.ne[2] * a.ne[3] == 1 and b.type is F32 and b.nb[0] == 4
    panels = emit.panels(a) if fits else None
    if panels is None:
        return strided_mul_mat(emit, node)
    tiles = activation_tiles(emit, a, b)
    emit(matmul.matmul_kernel(a.type), node, tiles, panels, a.ne[0], cuts=by_columns(a.ne[1]))
    return True


def activation_tiles(emit: Emit, weight: Tensor, x: Tensor) -> Scratch:
    """x as tiles for products with `weight`, made unless the last such step left them there."""
    form = activation.form(weight.type)
    tiles, ready = _area(emit, form, x)
    if not ready:
        cuts = by_tokens(x.ne[1] * x.ne[2] * x.ne[3]) | by_columns(x.ne[0])
        emit(activation.activation_kernel(form), x, tiles, cuts=cuts, writes=tiles)
    return tiles


def _area(emit: Emit, form: Form, x: Tensor) -> tuple[Scratch, bool]:
    """(memory for the tiles of x, whether they are there). Of two areas in turn, so that one may be written while the
    other is still read."""
    nbytes = int(activation.nbytes(form, x.ne[0], x.ne[1] * x.ne[2] * x.ne[3]))
    for turn in (0, 1):
        if (tiles := emit.holds(("tiles", form, turn), nbytes, x)) is not None:
            return tiles, True
    emit.turn ^= 1
    return emit.scratch(("tiles", form, emit.turn), nbytes, x)


@lowers("flash_attn_ext", "mul_mat")
def attend_and_multiply(emit: Emit, node: Tensor, product: Tensor) -> bool:
    """Who writes the result of the attention makes its tiles too."""
    a, x = product.src
    if not (activation.form(a.type) is Q8 and x.contiguous and x.root is node and node.ne[0] % 32 == 0
            and x.ne[0] == node.ne[0] * node.ne[1] and a.op == "none" and emit.panels(a) is not None):
        return False
    before = len(emit.steps)
    if not flash_attn_ext(emit, node, lambda: _area(emit, Q8, x)[0]):
        return False
    for step in emit.steps[before:]:
        step.nodes = (node,)
    return mul_mat(emit, product)


@lowers("mul_mat_id")
def mul_mat_id(emit: Emit, node: Tensor) -> bool:
    a, b, ids = node.src
    if a.op != "none" or a.ne[3] != 1 or b.type is not F32 or b.nb[0] != 4 or not node.contiguous:
        return False
    panels = emit.panels(a)
    if panels is None:
        return False
    (k, _, n_expert, _), n_used = a.ne, ids.ne[0]
    form, n_slots = activation.form(a.type), n_used * ids.ne[1]
    grouping, ready = emit.scratch("grouping", int(matmul_id.group_bytes(n_expert, n_slots)), ids)
    if not ready:
        emit(matmul_id.group_kernel, ids, grouping, n_expert, flags=ONE_THREAD)
    tiles, ready = emit.scratch(("gathered", form), int(activation.nbytes(form, k, n_slots)), (b, ids))
    if not ready:
        rows, ready = emit.scratch(("rows", form), int(activation.nbytes(form, k, b.ne[1] * b.ne[2])), b)
        if not ready:
            emit(activation.activation_kernel(form, rows=True), b, rows, 0)
        emit(matmul_id.gather_kernel(a.type), rows, b.ne[1], grouping, n_expert, n_used, tiles, k)
    emit(matmul_id.matmul_id_kernel(a.type), node, tiles, panels, k, grouping, n_expert)
    return True
