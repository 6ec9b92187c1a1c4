"""Products where each token names its matrices (mixture of experts), grouped by expert.

Comes in: panels of all experts, activations in rows, ids i32 [n_used, n_tokens]. Goes out: f32 [n_rows, n_used,
n_tokens].
Must not know: routing, what experts are.

Four steps: the activations become rows (`activation_kernel(.., rows=True)`), `group_kernel` sorts the slots (slot
s = token * n_used + j) by expert, `gather_kernel` puts the activations of each expert side by side as tiles, and
`matmul_id_kernel` multiplies each expert that has tokens with its tiles, each weight read once. An output has the same
bits as from `matmul`, whoever else asks for the expert.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ggraph import dtypes
from ggraph.dtypes import DType

from . import activation
from .activation import BLOCK, Q8, tile_of
from .kernel import Kernel, inline, kernel, simd, template
from .matmul import product, sizes
from .repack import ROWS

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

BAD_ID = 1                                          # error code: an id names no expert


def group_bytes(n_expert: Any, n_slots: Any) -> Any:
    """Bytes of a grouping: i32 starts [n_expert + 1] | i32 slots [n_slots], sorted by expert."""
    return 4 * (n_expert + 1 + n_slots)


def gather_kernel(dtype: DType) -> Kernel:
    """Parameters: address of the activation rows | rows per token (1 or n_used) | grouping | n_expert | n_used
    | address of the tiles | k. The tiles take `activation.nbytes(.., n_slots)`."""
    return _gather(activation.form(dtype).name, activation.width())


def matmul_id_kernel(dtype: DType) -> Kernel:
    """Parameters: dst, 9 words, contiguous | address of the tiles | address of the panels of expert 0, the others
    follow | k | grouping | n_expert."""
    return _matmul_id(dtype.name, activation.width())


@kernel
def group_kernel(p, ith, nth):
    """Parameters: ids, 9 words, i32 [n_used, n_tokens] | grouping | n_expert. A step for thread 0 alone. Within an
    expert the slots keep their order."""
    ids, n_used, n_tokens = simd.word(p, 0), simd.word(p, 1), simd.word(p, 2)
    starts, n_expert = simd.word(p, 9), simd.word(p, 10)
    slots = starts + 4 * (n_expert + 1)
    for e in range(n_expert + 1):
        simd.put_i32(starts + 4 * e, 0)
    for s in range(n_used * n_tokens):
        e = simd.get_i32(ids + s % n_used * simd.word(p, 5) + s // n_used * simd.word(p, 6))
        if e < 0 or e >= n_expert:
            simd.fail(BAD_ID)
            return
        simd.put_i32(starts + 4 * e + 4, simd.get_i32(starts + 4 * e + 4) + 1)
    for e in range(n_expert):
        simd.put_i32(starts + 4 * e + 4, simd.get_i32(starts + 4 * e + 4) + simd.get_i32(starts + 4 * e))
    # Filling from behind turns each start + 1 (the end of expert e) back into the start of e.
    for back in range(n_used * n_tokens):
        s = n_used * n_tokens - 1 - back
        e = simd.get_i32(ids + s % n_used * simd.word(p, 5) + s // n_used * simd.word(p, 6))
        at = simd.get_i32(starts + 4 * e + 4) - 1
        simd.put_i32(starts + 4 * e + 4, at)
        simd.put_i32(slots + 4 * at, s)
    for e in range(n_expert):
        simd.put_i32(starts + 4 * e, simd.get_i32(starts + 4 * e + 4))
    simd.put_i32(starts + 4 * n_expert, n_used * n_tokens)


@inline
def _copy_block(src, dst):
    for i in range(0, BLOCK, 8):
        simd.put_i64(dst + i, simd.get_i64(src + i))


@inline
def _copy_word(src, dst):
    simd.put_i32(dst, simd.get_i32(src))


@template
def _gather(form: str, width: int) -> Callable[..., None]:
    _, unit, unit_bytes = activation.FORMS[form]
    copy = _copy_block if form == Q8.name else _copy_word

    def gather(p, ith, nth):
        rows, per_token, starts, n_expert = simd.word(p, 0), simd.word(p, 1), simd.word(p, 2), simd.word(p, 3)
        n_used, dst, n = simd.word(p, 4), simd.word(p, 5), (simd.word(p, 6) + unit - 1) // unit
        slots = starts + 4 * (n_expert + 1)
        for e in range(n_expert):
            start, end = simd.get_i32(starts + 4 * e), simd.get_i32(starts + 4 * e + 4)
            for i in range(start + (ith - start) % nth, end, nth):
                slot = simd.get_i32(slots + 4 * i)
                row = slot // n_used * per_token + slot % n_used % per_token
                first, w = tile_of(i - start, end - start, width)
                src, to = rows + row * n * unit_bytes, dst + ((start + first) * n + i - start - first) * unit_bytes
                for b in range(n):
                    copy(src + b * unit_bytes, to + b * w * unit_bytes)
    return gather


@template
def _matmul_id(name: str, width: int) -> Callable[..., None]:
    dtype = dtypes.TYPES[name]
    run = product(dtype, width, scattered=True)
    column_bytes, panel_size = sizes(dtype)

    def matmul_id(p, ith, nth):
        dst, n_rows, stride, act = simd.word(p, 0), simd.word(p, 1), simd.word(p, 6), simd.word(p, 9)
        weights, k, starts, n_expert = simd.word(p, 10), simd.word(p, 11), simd.word(p, 12), simd.word(p, 13)
        column, size = column_bytes(k), panel_size(k) * ((n_rows + ROWS - 1) // ROWS)
        for e in range(n_expert):
            start, end = simd.get_i32(starts + 4 * e), simd.get_i32(starts + 4 * e + 4)
            run(weights + e * size, act + start * column, end - start, k, dst, stride, n_rows,
                starts + 4 * (n_expert + 1 + start), 1, ith, nth)
    return matmul_id
