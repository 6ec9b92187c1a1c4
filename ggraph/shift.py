"""K-shift: after positions moved, cached K rows are rotated by the difference.

In: a builder and a KV group. Out: a graph with one input, the shift of every cell; a shift of 0 leaves the row's value.
Layers that do not rotate K have nothing to follow. `settle` does what is left to do, before the next step.
"""
from __future__ import annotations

from collections.abc import Callable

from . import ops
from .build import Builder
from .graph import Graph
from .hparams import HParams
from .inputs import Given
from .memory.cache import KVCache
from .memory.layers import LayerMemory
from .schedule.plan import Plan
from .tensor import F32, I32, Tensor, leaf


def shift_graph(b: Builder, group: KVCache) -> Graph:
    """Its input is what `shifts` of the store gives, `k_shift` I32 [n_cells of all streams]."""
    shift = leaf(I32, (group.store.size * group.store.n_stream,), "k_shift")
    for il, cache in group.k.items():
        if b.hp.has_rope(il):
            b.g.expand(ops.cpy(_rotated(b, cache, b.hp.n_head_kv[il], il, shift, group.rot_k), cache))
    for il, cache in group.i.items():                   # those that are averaged stay as they were before rotation
        b.g.expand(ops.cpy(_rotated(b, cache, 1, il, shift, 0), cache))
    b.g.inputs.append(Given(shift))
    return b.g


def _rotated(b: Builder, cache: Tensor, n_head: int, il: int, shift: Tensor, rot: int) -> Tensor:
    head = cache.ne[0] // n_head
    x = ops.view(cache, (head, n_head, shift.ne[0]), (cache.type.row_bytes(head), cache.nb[1]))
    if cache.type is not F32:
        x = ops.cast(x, F32)
    x = ops.hadamard(x, rot) if rot else x
    x = b.rope(x, il, shift=shift, offset=b.hp.rope_offset)
    x = ops.hadamard(x, rot) if rot else x
    return ops.reshape(x, cache.ne)


def settle(memory: LayerMemory, hp: HParams, plan_of: Callable[[KVCache], Plan], n_threads: int) -> None:
    """Let K and V follow what sequence operations left to do: copies of streams, then rotations, each by its group's plan."""
    for group in memory.kv:
        for src, dst in group.store.take_copies():
            group.copy_stream(src, dst)
        if group.store.has_shift:
            _rotate(memory, group, plan_of(group) if any(map(hp.has_rope, group.k)) else None, n_threads)


def _rotate(memory: LayerMemory, group: KVCache, plan: Plan | None, n_threads: int) -> None:
    try:
        if plan is not None:
            plan.resize({})
            plan.fill(group.store.shifts())
            plan.run(n_threads)
        group.store.shifted()
    except BaseException:           # nobody knows which K was rotated
        for seq in group.store.moving():
            memory.forget(seq)
        raise
