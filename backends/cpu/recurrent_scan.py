"""The selective scan: each thread takes rows of states, or blocks of 16 rows of one head, through all tokens.

Comes in: parameter blocks. Goes out: outputs and states. Token by token in order, so a result depends on the sequence alone.
"""
from __future__ import annotations

from . import recurrent_rows
from .kernel import inline, simd, vmath
from .layout import address, nb, ne, share
from .recurrent_state import keeping, state_row

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

DST, X, DT, A, B, C, OLD, FROM, NEW, TO, REST = range(11)


def scan(n, height, per_channel, to_rows):
    """dst, x, steps, A, B, C, old states, their row numbers, new states, theirs where `to_rows`; number of states to keep.

    A row has 16 n elements. `height` rows go together: 16 of one head, or 1. `per_channel`: a decay for each element of a row
    (Mamba 1), else one for each head (Mamba 2).
    """
    block = recurrent_rows.scan_step(n)
    row_from, row_to = state_row(OLD, FROM), state_row(NEW, TO if to_rows else None)
    keep_before, keep_after = keeping(row_to, to_rows)

    @inline
    def rows(old, new, a, b, c, x, size, out):
        block(old, new, b, c, size * simd.load_f32(x), vmath.exp(size * simd.get_f32(a)), out)

    @inline
    def row(old, new, a, b, c, x, size, out):
        amount, total = size * simd.get_f32(x), simd.splat_f32(0.0)
        decay = vmath.exp(size * simd.get_f32(a))
        for j in range(0, 64 * n, 64):
            decay = vmath.exp(size * simd.load_f32(a + j)) if per_channel else decay
            y = simd.fma(simd.load_f32(old + j), decay, amount * simd.load_f32(b + j))
            simd.store_f32(new + j, y)
            total = simd.fma(y, simd.load_f32(c + j), total)
        simd.put_f32(out, simd.hsum(total))

    step = rows if height == 16 else row

    def k(p, ith, nth):
        dim, n_head, n_tokens = ne(p, X, 0), ne(p, X, 1), ne(p, X, 2)
        n_kept, nbytes, n_rows = simd.word(p, 9 * REST), 64 * n * height, dim * n_head
        per_group, blocks = n_head // ne(p, B, 1), n_rows // height
        first, last = share(blocks * ne(p, X, 3), ith, nth)
        for unit in range(first, last):
            s = unit // blocks
            part = unit - s * blocks
            old, new = row_from(p, s, 0), row_to(p, s, 0)
            if old == 0 or new == 0:
                return
            start = nbytes * part
            old, new = old + start, new + start
            keep_before(p, s, start, old, nbytes, n_tokens, n_kept)
            h = height * part // dim
            a = address(p, A) + h * nb(p, A, 1)
            b = address(p, B) + h // per_group * nb(p, B, 1) + s * nb(p, B, 3)
            c = address(p, C) + h // per_group * nb(p, C, 1) + s * nb(p, C, 3)
            x = address(p, X) + h * nb(p, X, 1) + 4 * (height * part - h * dim) + s * nb(p, X, 3)
            dt = address(p, DT) + 4 * h + s * nb(p, DT, 2)
            out = address(p, DST) + 4 * (n_rows * n_tokens * s + height * part)
            for t in range(n_tokens):
                step(old, new, a, b, c, x, simd.splat_f32(simd.get_f32(dt)), out)
                keep_after(p, s, start, new, nbytes, n_tokens - 1 - t, n_kept)
                old = new
                b += nb(p, B, 2)
                c += nb(p, C, 2)
                x += nb(p, X, 2)
                dt += nb(p, DT, 1)
                out += 4 * n_rows
    return k
