"""K-shift: after positions moved, the cached K rows are rotated by the difference. In: a KV group. Out: a plan for it."""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import ops
from .build import Builder, Dims
from .errors import Error
from .memory.cache import KVCache
from .tensor import F32, I32, Tensor, leaf

if TYPE_CHECKING:
    from .context import Context
    from .schedule.plan import Plan


class Shift:
    """`k_shift` I32 [n_cells of all streams]: by how much each cell's position moved. Filled by the caller."""

    def __init__(self, n_cells: int):
        self.tensors = (leaf(I32, (n_cells,), "k_shift"),)

    def fill(self, step: object) -> tuple[np.ndarray, ...]:
        return ()


def shift_plan(ctx: Context, group: KVCache) -> Plan:
    """Rotate every K row of the group by its shift; a shift of 0 leaves the row's value."""
    hp = ctx.model.hparams
    if hp.rope_mode is None:
        raise Error(f"positions of architecture {hp.arch!r} cannot be moved: it does not rotate K")
    cells = group.store.size * group.store.n_stream
    b = Builder(hp, ctx.model.weights, ctx.cparams, ctx.memory, Dims.largest(ctx.cparams, recurrent=False))
    source = Shift(cells)
    b.g.inputs.append(source)
    for il, cache in group.k.items():
        b.g.expand(ops.cpy(_rotated(b, group, il, source.tensors[0]), cache))
    return ctx.plan(b.g)


def _rotated(b: Builder, group: KVCache, il: int, shift: Tensor) -> Tensor:
    cache, n_head = group.k[il], b.hp.n_head_kv[il]
    head = cache.ne[0] // n_head
    x = ops.view(cache, (head, n_head, shift.ne[0]), (cache.type.row_bytes(head), cache.nb[1]))
    if cache.type is not F32:
        x = ops.cast(x, F32)
    x = ops.hadamard(x, group.rot_k) if group.rot_k else x
    x = b.rope(x, il, pos=shift)
    x = ops.hadamard(x, group.rot_k) if group.rot_k else x
    return ops.reshape(x, cache.ne)
