"""Attention as one op: softmax over the keys that each token sees, chunk by chunk.

Comes in: the block that `ops_attention` writes. Goes out: float32 rows of the node. Must not know: memory, graphs.
Like `simd` it loads Numba, so it is imported when a kernel is made.

The keys of a token are walked in the order of their positions, cut into chunks at multiples of CHUNK positions. A chunk
gives a state: the sum of the values under e^(score - top), the top, and the sum of the weights, lane by lane of the
position. States of a row are merged in order. Within a chunk every number is one chain of operations over positions or
over the elements of a head, and a key that is not seen adds exact zeros. So a token's bits depend on what it sees and
on nothing else: not on the other tokens of its tile, on threads, on where cells lie, on prompt or decode.

A tile is a run of tokens of one sequence, with all query heads of one KV head: its keys and values are read and
converted once. Where there is room for the states of all chunks, threads share the chunks and `merge` follows;
otherwise each tile is one thread's.
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ggraph import dtypes

from . import attention_state as state
from . import attention_view as view
from . import simd, vmath
from .activation import BLOCK, quantize, tile_of
from .attention_block import (
    ALIBI,
    CHUNK,
    K_ROOT,
    MASK,
    N_PARTS,
    OUT,
    PANEL,
    PARTS,
    SCALE,
    SLOPES,
    SOFTCAP,
    THREADS,
    TILE,
    TILES,
    V_ROOT,
    WORK,
    WORK_BYTES,
    K,
    Q,
    V,
)
from .attention_rows import columns, product, values
from .kernel import inline
from .layout import address, nb, ne, share

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

# What a thread needs for a chunk of a tile lies in its own work memory.

@inline
def _areas(p, work):
    """Queries | columns of keys | values | scores | mask of a token | addresses of rows | 16 rows of float32."""
    dk, rows = ne(p, Q, 0) + 15 & -16, simd.word(p, TILE) * view.group(p)
    keys = work + 4 * rows * dk
    vals = keys + 4 * CHUNK * dk
    scores = vals + CHUNK * state.width(p)
    bias = scores + 4 * CHUNK * rows
    places = bias + 4 * CHUNK
    return work, keys, vals, scores, bias, places, places + 8 * CHUNK


@inline
def _scores(p, x, bias, slope, i):
    """16 scores: scaled, capped, with the mask added."""
    x = x * simd.f32(p, SCALE)
    if simd.f32(p, SOFTCAP) != 0.0:
        x = vmath.tanh(x) * simd.f32(p, SOFTCAP)
    if bias != 0:
        x = simd.fma(simd.load_f32(bias + 4 * i), simd.splat_f32(slope), x)
    return x


@inline
def _decay(x):
    """e^x for x <= 0, by `vmath.exp`'s polynomial. What would be subnormal, and -inf, gives 0; NaN stays."""
    magic = simd.splat_f32(12582912.0)                      # 1.5 * 2^23: adding it rounds to an integer
    shifted = simd.fma(x, simd.splat_f32(1.44269504088896341), magic)
    whole = shifted - magic
    r = simd.fma(whole, simd.splat_f32(-0.693359375), x)
    r = simd.fma(whole, simd.splat_f32(2.12194440e-4), r)
    y = simd.fma(r, simd.splat_f32(1.9875691500e-4), simd.splat_f32(1.3981999507e-3))
    y = simd.fma(y, r, simd.splat_f32(8.3334519073e-3))
    y = simd.fma(y, r, simd.splat_f32(4.1665795894e-2))
    y = simd.fma(y, r, simd.splat_f32(1.6666665459e-1))
    y = simd.fma(y, r, simd.splat_f32(5.0000001201e-1))
    y = simd.fma(y, r * r, r) + 1.0
    power = simd.as_f32((simd.as_i32(shifted) << 23) + 0x3F800000)          # 2^whole: the low bits of `shifted`
    return simd.select(x < -87.0, simd.splat_f32(0.0), y * power)


@inline
def _weigh(p, row, n, lo, hi, bias, slope, dst):
    """Scores to weights, in place; those outside of [lo, hi) are 0. Their top and the lanes' sums go to dst."""
    top = simd.splat_f32(state.NEVER)
    for i in range(0, n, 16):
        x = _scores(p, simd.load_f32(row + 4 * i), bias, slope, i)
        if lo > i or hi < i + 16:
            lane = simd.iota() + i
            x = simd.select((lane >= lo) & (lane < hi), x, simd.splat_f32(state.NEVER))
        simd.store_f32(row + 4 * i, x)
        top = simd.maximum(x, top)
    top = simd.splat_f32(simd.hmax(top))
    base = simd.select(top == state.NEVER, simd.splat_f32(0.0), top)
    sums = simd.splat_f32(0.0)
    for i in range(0, n, 16):
        x = _decay(simd.load_f32(row + 4 * i) - base)
        simd.store_f32(row + 4 * i, x)
        sums = sums + x
    total = simd.splat_f32(simd.hsum(sums))
    simd.store_f32(dst, simd.select(total == total, top, total))            # NaN must not pass for nothing seen
    simd.store_f32(dst + 64, sums)


@inline
def _softmax(p, h, t, end, bottom, top, scores, bias, states):
    """Weights and states of all rows of a tile."""
    first, n = bottom & -16, top - (bottom & -16) + 15 & -16
    masked = bias if address(p, MASK) != 0 else 0
    for u in range(t, end):
        lo, hi, start = view.seen(p, u)
        if masked != 0:
            view.load_mask(p, u, bottom, top, bias)
        for head in range(h * view.group(p), (h + 1) * view.group(p)):
            slope = simd.f32(p, SLOPES + head) if simd.word(p, ALIBI) != 0 else np.float32(1.0)
            _weigh(p, scores, n, start + lo - first, min(start + hi, top) - first, masked, slope,
                   states + state.width(p))
            scores, states = scores + 4 * CHUNK, states + state.size(p)


def _chunk(type_k: str, wide_k: bool, type_v: str, whole_v: bool) -> Callable[..., None]:
    """(p, h, t, end, bottom, top, limit, work, states): the states of a tile for the positions bottom to top of one
    chunk; the tile goes on to position `limit`."""
    (kind_k, as_columns), (kind_v, as_values) = columns(type_k, wide_k), values(type_v, whole_v)
    times_keys = product(kind_k, hint=True)
    times_values = product(kind_v, listed=True, hint=kind_v == type_v and whole_v)
    element = dtypes.TYPES[kind_k].nbytes

    @inline
    def chunk(p, h, t, end, bottom, top, limit, work, states):
        queries, keys, vals, scores, bias, places, spare = _areas(p, work)
        dk, k_row, v_row, entries = ne(p, Q, 0), nb(p, K, 1), nb(p, V, 1), view.cells(p, t)
        q_row, rows, panel = 4 * (dk + 15 & -16), (end - t) * view.group(p), PANEL * element * (dk + 15 & -16)
        n, ahead = top - (bottom & -16) + 15 & -16, CHUNK if top < limit else 0
        _, _, start = view.seen(p, t)
        view.find_rows(view.head_of(p, K, K_ROOT, h, t), k_row, entries, start, bottom, top, places)
        for i in range(0, n, 16):
            as_columns(places + 8 * i, dk, keys + i // PANEL * panel + i % PANEL * element, spare)
        times_keys(queries, q_row, keys, panel, PANEL * element, dk, scores, 4 * CHUNK, rows, n >> 4, places,
                   ahead * k_row)
        _softmax(p, h, t, end, bottom, top, scores, bias, states)
        view.find_rows(view.head_of(p, V, V_ROOT, h, t), v_row, entries, start, bottom, top, places)
        as_values(places, n, ne(p, V, 0), vals, ahead * v_row)
        times_values(scores, 4 * CHUNK, places, 0, 0, n, states, state.size(p), rows, state.width(p) >> 6, 0,
                     ahead * v_row)
    return chunk


# Who does what. A thread takes what starts within its share of the work.

def attend(type_k: str, wide_k: bool, type_v: str, whole_v: bool) -> Callable[..., None]:
    """Kernel: states of all chunks where there is room for them, otherwise the result. `wide_k`: heads of keys have
    at least 32 numbers; `whole_v`: those of values a multiple of 16."""
    chunk = _chunk(type_k, wide_k, type_v, whole_v)

    @inline
    def part(p, h, t, end, c, n_chunks, lo, hi, limit, work, states):
        """Chunk c of a tile. Its states go to `states`; where that is 0, they are merged with those before, and the
        last gives the result."""
        rows, size = (end - t) * view.group(p), (end - t) * view.group(p) * state.size(p)
        sums = work + simd.word(p, WORK_BYTES) - size
        new = states if states != 0 else sums - size
        if states != 0 or c == 0:
            view.load_queries(p, h, t, end, work)
            state.clear(p, sums, rows)
        if lo < hi:
            chunk(p, h, t, end, lo, hi, limit, work, new)
        else:
            state.clear(p, new, rows)
        if states == 0:
            state.merge(p, sums, new, rows)
            if c == n_chunks - 1:
                for r in range(rows):
                    _finish(p, sums + r * state.size(p), t, h, r)

    def kernel(p, ith, nth):
        nth = min(nth, simd.word(p, THREADS))
        if ith >= nth:
            return
        work, n_head = simd.word(p, WORK) + ith * simd.word(p, WORK_BYTES), ne(p, K, 2)
        total, n_states = view.work(p)
        split, states = n_states <= simd.word(p, N_PARTS), simd.word(p, PARTS)
        t = done = 0
        while t < view.n_tokens(p):
            end, bottom, top = view.tile(p, t)
            n_chunks, size, mine = view.n_chunks(bottom, top), (end - t) * view.group(p) * state.size(p), False
            for i in range(n_head * n_chunks):
                h, c = (i % n_head, i // n_head) if split else (i // n_chunks, i % n_chunks)
                lo, hi = view.chunk(bottom, top, c)
                if split or c == 0:
                    mine = done * nth // total == ith
                if mine:
                    part(p, h, t, end, c, n_chunks, lo, hi, top, work, states + i * size if split else 0)
                done += (end - t) * (hi - lo)
            if simd.aborted():
                return
            states += n_head * n_chunks * size
            t = end
    return kernel


@inline
def _finish(p, at, t, h, r):
    """Row r of a tile that starts with token t."""
    state.finish(p, at, t + r // view.group(p), h * view.group(p) + r % view.group(p))


def merge(width: int) -> Callable[..., None]:
    """Kernel: the result from the states of all chunks, if `attend` left them. With a width, tiles of so many tokens at
    most, of the quantized result, are written to TILES."""
    @inline
    def quantize_row(p, t, head):
        """The rows of the result must lie one after the other, and have whole blocks."""
        n, n_head = ne(p, V, 0) >> 5, ne(p, Q, 2)
        src = address(p, OUT) + 4 * ne(p, V, 0) * (t * n_head + head)
        first, w = tile_of(t, view.n_tokens(p), width)
        dst = simd.word(p, TILES) + BLOCK * (first * n * n_head + t - first)
        for b in range(n):
            quantize(src + 128 * b, dst + BLOCK * w * (head * n + b))

    @inline
    def merge_all(p, ith, nth):
        sums, states, n_head = simd.word(p, WORK) + ith * simd.word(p, WORK_BYTES), simd.word(p, PARTS), ne(p, K, 2)
        t = done = 0
        while t < view.n_tokens(p):
            end, bottom, top = view.tile(p, t)
            rows, n_chunks = (end - t) * view.group(p), view.n_chunks(bottom, top)
            for i in range(n_head * rows):
                if done * nth // (view.n_tokens(p) * ne(p, Q, 2)) == ith:
                    state.clear(p, sums, 1)
                    for c in range(n_chunks):
                        state.merge(p, sums, states + (c * n_head * rows + i) * state.size(p), 1)
                    _finish(p, sums, t, i // rows, i % rows)
                    if width:
                        quantize_row(p, t + i % rows // view.group(p), i // rows * view.group(p) + i % view.group(p))
                done += 1
            states += n_chunks * n_head * rows * state.size(p)
            t = end

    def kernel(p, ith, nth):
        nth = min(nth, simd.word(p, THREADS))
        _, n_states = view.work(p)
        if ith >= nth:
            return
        if n_states <= simd.word(p, N_PARTS):
            merge_all(p, ith, nth)
        elif width:
            first, last = share(view.n_tokens(p) * ne(p, Q, 2), ith, nth)
            for i in range(first, last):
                quantize_row(p, i // ne(p, Q, 2), i % ne(p, Q, 2))
    return kernel
