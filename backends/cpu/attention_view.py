"""What a block of flash_attn_ext says: who sees what, and where keys, values, queries and the mask of it are.

Comes in: the block (`attention_block`). Goes out: tokens, tiles, addresses. Must not know: how scores become results.
Like `simd` it loads Numba, so it is imported when a kernel is made.

A tile is a run of tokens of one sequence. What a token sees are entries lo to hi of its sequence's list of cells; where
no lists are given, the rows of its stream, and the mask adds to the scores.
"""
from __future__ import annotations

from . import simd
from .attention_block import CELLS, CHUNK, K_ROOT, MASK, SPANS, TILE, K, Q
from .kernel import inline
from .layout import address, nb, ne

# mypy: disable-error-code="no-untyped-def, no-untyped-call"


@inline
def _span(p, i, t):
    return simd.get_i32(address(p, SPANS) + i * nb(p, SPANS, 1) + 4 * t)


@inline
def seen(p, t):
    """First and one past the last entry that token t sees, and the position of entry 0."""
    if address(p, SPANS) == 0:
        return 0, ne(p, K, 1), 0
    return _span(p, 1, t), _span(p, 2, t), _span(p, 3, t)


@inline
def n_tokens(p):
    return ne(p, Q, 1) * ne(p, Q, 3)


@inline
def group(p):
    """Query heads of one KV head."""
    return ne(p, Q, 2) // ne(p, K, 2)


@inline
def _one_list(p, t, u):
    return address(p, SPANS) == 0 or (_span(p, 0, t) == _span(p, 0, u) and _span(p, 3, t) == _span(p, 3, u))


@inline
def tile(p, t):
    """One past the last token of the tile that starts with t; first and one past the last position that it sees."""
    n = ne(p, Q, 1)
    last, end, bottom, top = min(t + simd.word(p, TILE), (t // n + 1) * n), t, 0, 0
    while end < last and _one_list(p, t, end):
        lo, hi, start = seen(p, end)
        if lo < hi:
            bottom = min(bottom, start + lo) if top > 0 else start + lo
            top = max(top, start + hi)
        end += 1
    return end, bottom, top


@inline
def n_chunks(bottom, top):
    """At least one, so that a tile that sees nothing is written too."""
    return (top + CHUNK - 1) // CHUNK - bottom // CHUNK if bottom < top else 1


@inline
def chunk(bottom, top, c):
    """First and one past the last position of chunk c."""
    start = (bottom // CHUNK + c) * CHUNK
    return max(start, bottom), min(start + CHUNK, top)


@inline
def work(p):
    """Pairs of token and position over all KV heads, and states of all chunks."""
    t = cost = states = 0
    while t < n_tokens(p):
        end, bottom, top = tile(p, t)
        cost += (end - t) * (top - bottom + 1)
        states += (end - t) * n_chunks(bottom, top)
        t = end
    return cost * ne(p, K, 2), states * ne(p, Q, 2)


@inline
def cells(p, t):
    """Where the list of token t is, or 0."""
    return address(p, CELLS) + 4 * _span(p, 0, t) if address(p, SPANS) != 0 else 0


@inline
def _cell(entries, i):
    return simd.get_i32(entries + 4 * i) if entries != 0 else i


@inline
def find_rows(head, row, entries, start, bottom, top, dst):
    """Addresses of the rows of positions from `bottom`, rounded down to 16, to `top`, rounded up; what is rounded
    stands for the row beside it. `head`: address in row 0; `start`: position of the first entry."""
    first, last = bottom & -16, top + 15 & -16
    for i in range(bottom, top):
        simd.put_i64(dst + 8 * (i - first), head + _cell(entries, i - start) * row)
    for i in range(first, bottom):
        simd.put_i64(dst + 8 * (i - first), simd.get_i64(dst + 8 * (bottom - first)))
    for i in range(top, last):
        simd.put_i64(dst + 8 * (i - first), simd.get_i64(dst + 8 * (top - 1 - first)))


@inline
def head_of(p, x, root, h, t):
    """Address of head h in row 0: of the cache where rows are listed, else of the stream of token t."""
    if address(p, SPANS) != 0:
        return address(p, root) + (address(p, x) - address(p, root)) % nb(p, root, 1) + h * nb(p, x, 2)
    return address(p, x) + h * nb(p, x, 2) + t // ne(p, Q, 1) * nb(p, x, 3)


@inline
def load_queries(p, h, t, end, dst):
    """The rows of a tile, each rounded up to a multiple of 16 with zeros: tokens, and for each the heads of a group."""
    n, dk = ne(p, Q, 1), ne(p, Q, 0)
    stream = t // n
    for u in range(t, end):
        for head in range(h * group(p), (h + 1) * group(p)):
            q = address(p, Q) + (u - stream * n) * nb(p, Q, 1) + head * nb(p, Q, 2) + stream * nb(p, Q, 3)
            for i in range(0, dk, 16):
                simd.store_f32(dst + 4 * i, simd.load_f32_n(q + 4 * i, dk - i))
            dst += 4 * (dk + 15 & -16)


@inline
def load_mask(p, t, bottom, top, dst):
    """What the mask adds for token t, from `bottom`, rounded down to 16, to `top`. Its columns are rows of the stream."""
    n, element = ne(p, Q, 1), nb(p, MASK, 0)
    stream = t // n
    place = address(p, MASK) + (t - stream * n) * nb(p, MASK, 1) + stream % ne(p, MASK, 3) * nb(p, MASK, 3)
    _, _, start = seen(p, t)
    entries, skipped = cells(p, t), 0
    if entries != 0:
        skipped = (address(p, K) - address(p, K_ROOT) + stream * nb(p, K, 3)) // nb(p, K_ROOT, 1)
    for i in range(bottom, top):
        x = place + (_cell(entries, i - start) - skipped) * element
        simd.put_f32(dst + 4 * (i - (bottom & -16)), simd.get_f16(x) if element == 2 else simd.get_f32(x))
