"""The gated delta rule: each thread takes blocks of 16 rows of heads' states through all tokens.

Comes in: parameter blocks. Goes out: outputs and states. Token by token in order, so a result depends on the sequence alone.
"""
from __future__ import annotations

from . import recurrent_rows
from .kernel import inline, simd, vmath
from .layout import address, nb, ne, share
from .recurrent_state import keeping, state_row

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

DST, Q, K, V, DECAY, BETA, OLD, FROM, NEW, TO, REST = range(11)


def delta_net(n, per_channel, in_place):
    """dst, q, k, v, decays, beta, old states, their row numbers, new states, theirs; scale, number of states to keep.

    q and k have 16 n elements a head. Decays: those of each channel, or the logarithm of one of each head. `in_place`: states
    are rows by number.
    """
    step = recurrent_rows.delta_step(n, per_channel)
    row_from, row_to = state_row(OLD, FROM if in_place else None), state_row(NEW, TO if in_place else None)
    keep_before, keep_after = keeping(row_to, in_place)

    @inline
    def decay_at(g):
        return simd.splat_f32(0.0) if per_channel else vmath.exp(simd.splat_f32(simd.get_f32(g)))

    @inline
    def head(p, t, h, s):
        return address(p, t) + h * nb(p, t, 1) + s * nb(p, t, 3)

    def k(p, ith, nth):
        d, n_head, n_tokens = ne(p, V, 0), ne(p, V, 1), ne(p, V, 2)
        scale, n_kept, nbytes = simd.f32(p, 9 * REST), simd.word(p, 9 * REST + 1), 64 * d
        blocks = d >> 4
        first, last = share(blocks * n_head * ne(p, V, 3), ith, nth)
        for unit in range(first, last):
            i = unit // blocks
            part = unit - i * blocks
            s = i // n_head
            h = i - s * n_head
            old, new = row_from(p, s, 0), row_to(p, s, 0)
            if old == 0 or new == 0:
                return
            start = nbytes * (blocks * h + part)
            old, new = old + start, new + start
            keep_before(p, s, start, old, nbytes, n_tokens, n_kept)
            qk = h % ne(p, K, 1)
            q, kk, v = head(p, Q, qk, s), head(p, K, qk, s), head(p, V, h, s) + 64 * part
            g, beta = head(p, DECAY, h, s), head(p, BETA, h, s)
            out = address(p, DST) + 4 * d * (n_head * n_tokens * s + h) + 64 * part
            for t in range(n_tokens):
                step(old, new, q, kk, v, g, decay_at(g), simd.get_f32(beta), scale, out)
                keep_after(p, s, start, new, nbytes, n_tokens - 1 - t, n_kept)
                old = new
                q += nb(p, Q, 2)
                kk += nb(p, K, 2)
                v += nb(p, V, 2)
                g += nb(p, DECAY, 2)
                beta += nb(p, BETA, 2)
                out += 4 * d * n_head
    return k
