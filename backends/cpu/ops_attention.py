"""Attention: which nodes have native kernels, and the blocks of these.

Comes in: flash_attn_ext and mul_mat nodes. Goes out: steps. What the kernels do is in `attention_flash` and
`attention_product`, which are imported (with Numba) only where one must be compiled.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from ggraph import ops
from ggraph.dtypes import BF16, F16, F32
from ggraph.tensor import Tensor

from ..lowering import Scratch
from ..ref.rows import alibi_slopes
from . import activation
from .attention_block import CHUNK, PANEL, PIECE, ROWS, state_bytes, work_bytes
from .kernel import template
from .layout import f32_rows, in_rows
from .lower import Emit, Field, lowers
from .unpack import unpacks

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

PARTS_BYTES = 8 << 20           # for the states of chunks, beyond those of one token
_NOTHING = (0,) * 9


@template
def _attend(type_k, wide_k, type_v, whole_v):
    from .attention_flash import attend
    return attend(type_k, wide_k, type_v, whole_v)


@template
def _merge(width):
    from .attention_flash import merge
    return merge(width)


def _readable(x: Tensor) -> bool:
    return (x.type in (F32, F16, BF16) or unpacks(x.type)) and in_rows(x)


def _listed(x: Tensor) -> bool:
    """Rows of x are rows of its root, so that cell numbers tell where they are."""
    return x.root.type is x.type and x.nb[1] == x.root.nb[1]


@lowers("flash_attn_ext")
def flash_attn_ext(emit: Emit, node: Tensor, tiles: Callable[[], Scratch] | None = None) -> bool:
    """`tiles`: gives the place where the result is wanted as activation tiles too, for quantized weights."""
    q, k, v, mask, sinks, cells, spans = node.src
    assert q is not None and k is not None and v is not None
    if not (f32_rows(q) and _readable(k) and _readable(v) and k.ne[2] == v.ne[2] and (sinks is None or f32_rows(sinks))):
        return False
    lists = cells is not None and spans is not None and _listed(k) and _listed(v)
    max_bias = node.params["max_bias"]
    if lists and not max_bias:
        mask = None
    if not (mask is None or (mask.type in (F32, F16) and in_rows(mask) and int(mask.ne[2]) == 1)):
        return False
    cells = ops.view(cells, (1,)) if lists else None        # only where they begin is read, and their number grows with each token
    spans = spans if lists else None
    fields = _block(emit, node, (node, q, k, v, k.root, v.root, cells, spans, mask, sinks), tiles() if tiles else 0)
    emit(_attend(k.type.name, int(k.ne[0]) >= 32, v.type.name, int(v.ne[0]) % 16 == 0), *fields)
    emit(_merge(activation.width() if tiles else 0), *fields)
    return True


def _block(emit: Emit, node: Tensor, tensors: Sequence[Tensor | None], tiles: Scratch | int) -> list[Field]:
    """The block of `attention_block`, for the largest sizes: the batch at hand may be smaller."""
    _, q, k, v, *_ = (t.ne for t in tensors if t is not None)
    dk, n_head, group, dv = int(q[0]), int(q[2]), int(q[2]) // int(k[2]), int(v[0])
    tile = max(1, ROWS // group)
    threads, work = os.cpu_count() or 1, work_bytes(tile * group, dk, dv)
    token = n_head * (int(k[1]) // CHUNK + 2) * state_bytes(dv)
    parts = max(token, min(token * int(q[1] * q[3]), PARTS_BYTES))
    memory, _ = emit.scratch("attention work", threads * work)
    states, _ = emit.scratch("attention states", parts)
    scale, cap, max_bias = (float(node.params[name]) for name in ("scale", "logit_softcap", "max_bias"))
    slopes = alibi_slopes(n_head, max_bias).tolist() if max_bias else []
    fields: list[Field] = []
    for t in tensors:
        fields += _NOTHING if t is None else (t,)
    return [*fields, threads, memory, work, states, parts // state_bytes(dv), tile, scale / (cap or 1), cap,
            tiles, int(max_bias > 0), *slopes]


@template
def _multiply_rows(name):
    from .attention_product import multiply_rows
    return multiply_rows(name)


def strided_mul_mat(emit: Emit, node: Tensor) -> bool:
    """mul_mat with a left side that is no packed weight; the numbers of its rows lie side by side. For `lowers`."""
    a, b = node.src
    if not (_readable(a) and f32_rows(b)):
        return False
    rows = max(ROWS, int(b.ne[2]) // int(a.ne[2]) * (int(b.ne[3]) // int(a.ne[3])))
    threads, work = os.cpu_count() or 1, 4 * PANEL * (PIECE + rows) + 8 * PANEL + 64 * PIECE
    memory, _ = emit.scratch("product work", threads * work)
    emit(_multiply_rows(a.type.name), node, a, b, threads, memory, work)
    return True
