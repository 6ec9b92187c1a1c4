"""Linear attention with decays, RWKV 6 and RWKV 7: each thread takes 16 outputs of a head through all tokens of a sequence.

Comes in: parameter blocks. Goes out: outputs and states. Token by token in order, so a result depends on the sequence alone.
"""
from __future__ import annotations

from . import recurrent_rows
from .kernel import inline, simd
from .layout import address, nb, ne, share
from .recurrent_state import state_row

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

DST, OLD, FROM, NEW, TO, FIRST = range(6)           # then the op's sources in its own order


def linear(op, n, in_place):
    """dst, old states, their row numbers, new states, theirs, the op's sources but the state, scale. Heads have 16 n elements.

    `in_place`: states are rows by number.
    """
    row_from, row_to = state_row(OLD, FROM if in_place else None), state_row(NEW, TO if in_place else None)
    step = rwkv7(n) if op == "rwkv_wkv7" else columns(op)

    def k(p, ith, nth):
        d, n_head, n_seqs = ne(p, FIRST, 0), ne(p, FIRST, 1), simd.word(p, 9 * (FIRST + 6) + 1)
        n_tokens, scale = ne(p, FIRST, 2) // n_seqs, simd.f32(p, 9 * (FIRST + 6))
        blocks = d >> 4
        first, last = share(blocks * n_head * n_seqs, ith, nth)
        for unit in range(first, last):
            i = unit // blocks
            part = unit - i * blocks
            s = i // n_head
            h = i - s * n_head
            old, new = row_from(p, s, 0), row_to(p, s, 0)
            if old == 0 or new == 0:
                return
            old, new = old + 4 * d * d * h, new + 4 * d * d * h
            out = address(p, DST) + 4 * d * (n_head * n_tokens * s + h) + 64 * part
            for t in range(n_tokens * s, n_tokens * (s + 1)):
                step(p, old, new, h, t, part, d, scale, out)
                old = new
                out += 4 * d * n_head
    return k


@inline
def source(p, i, h, t):
    """Source i of head h and token t, which may be the same for all tokens."""
    return address(p, FIRST + i) + h * nb(p, FIRST + i, 1) + (t * nb(p, FIRST + i, 2) if ne(p, FIRST + i, 2) > 1 else 0)


def columns(op):
    """S [v, k]: a part of 16 columns v of all rows k."""
    six = op == "rwkv_wkv6"

    @inline
    def step(p, old, new, h, t, part, d, scale, out):
        k, v, r = source(p, 0, h, t), simd.load_f32(source(p, 1, h, t) + 64 * part), source(p, 2, h, t)
        first, decay = source(p, 3, h, 0), source(p, 4 if six else 3, h, t)
        spread = ne(p, FIRST + (4 if six else 3), 0) == 1
        total = simd.splat_f32(0.0)
        for i in range(0, 4 * d, 4):
            at = d * i + 64 * part
            s, kv = simd.load_f32(old + at), simd.get_f32(k + i) * v
            after = simd.fma(s, simd.splat_f32(simd.get_f32(decay + (0 if spread else i))), kv)
            seen = simd.fma(kv, simd.splat_f32(simd.get_f32(first + i)), s) if six else after
            total = simd.fma(seen, simd.splat_f32(simd.get_f32(r + i)), total)
            simd.store_f32(new + at, after)
        simd.store_f32(out, total if six else total * scale)
    return step


def rwkv7(n):
    """S [k, v]: 16 rows v."""
    block = recurrent_rows.correct_step(n)

    @inline
    def step(p, old, new, h, t, part, d, scale, out):
        at = 1024 * n * part
        r, w, k, v = source(p, 0, h, t), source(p, 1, h, t), source(p, 2, h, t), source(p, 3, h, t) + 64 * part
        block(old + at, new + at, r, w, k, v, source(p, 4, h, t), source(p, 5, h, t), out)
    return step

