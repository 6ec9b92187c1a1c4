"""Causal convolution over time of each channel, with up to four taps: alone, or with the row of inputs it goes on from.

Comes in: parameter blocks. Goes out: results, and rows of the last inputs. Products are added from the oldest input to the
newest, without fma, so both forms give the same bits.
"""
from __future__ import annotations

from . import recurrent_rows
from .kernel import inline, simd, vmath
from .layout import address, nb, ne, share
from .recurrent_state import state_row

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

DST, X, KERNEL, BIAS, OLD, FROM, NEW, TO = range(8)


def going_on(d_conv, biased, act):
    """dst, x, kernel, bias if `biased`, old rows, their numbers, new rows, theirs, how many to keep: x lies channel by
    channel."""
    m = d_conv - 1
    row_from, row_to = state_row(OLD, FROM), state_row(NEW, TO)
    old0, old1, old2 = (recurrent_rows.taps(m, m - 3 + i) for i in range(3))
    tap0, tap1, tap2, tap3 = (recurrent_rows.taps(d_conv, d_conv - 4 + i) for i in range(4))
    store = recurrent_rows.store_taps(m)

    @inline
    def finish(x, bias):
        x = x + bias if biased else x
        return vmath.silu(x) if act == "silu" else x

    def k(p, ith, nth):
        blocks, n_tokens, n_kept = ne(p, DST, 0) >> 4, ne(p, DST, 1), simd.word(p, 72)
        first, last = share(blocks * ne(p, DST, 2), ith, nth)
        for unit in range(first, last):
            s = unit // blocks
            part = unit - s * blocks
            old, kernel = row_from(p, s, 0), address(p, KERNEL) + 64 * d_conv * part
            if old == 0:
                return
            old += 64 * m * part
            x0, x1, x2 = old0(old), old1(old), old2(old)
            w0, w1, w2, w3 = tap0(kernel), tap1(kernel), tap2(kernel), tap3(kernel)
            bias = simd.load_f32(address(p, BIAS) + 64 * part) if biased else w0
            x = address(p, X) + 64 * part + s * nb(p, X, 2)
            y = address(p, DST) + 4 * ne(p, DST, 0) * n_tokens * s + 64 * part
            for back in range(n_tokens - 1, -1, -1):
                x3 = simd.load_f32(x)
                simd.store_f32(y, finish(((x0 * w0 + x1 * w1) + x2 * w2) + x3 * w3, bias))
                x0, x1, x2 = x1, x2, x3
                x += nb(p, X, 1)
                y += 4 * ne(p, DST, 0)
                if back < n_kept:
                    new = row_to(p, s, back)
                    if new == 0:
                        return
                    store(new + 64 * m * part, x0, x1, x2)
    return k


def alone():
    """dst, x, kernel: x lies along time."""
    @inline
    def along_time(x, w, d_conv, n):
        """Up to 16 results of one channel."""
        total = simd.load_f32_n(x, n) * simd.splat_f32(simd.get_f32(w))
        for j in range(4, 4 * d_conv, 4):
            total += simd.load_f32_n(x + j, n) * simd.splat_f32(simd.get_f32(w + j))
        return total

    def k(p, ith, nth):
        channels, n_tokens, d_conv = ne(p, 0, 0), ne(p, 0, 1), ne(p, 2, 0)
        steps = (n_tokens + 15) >> 4
        first, last = share(channels * steps * ne(p, 0, 2), ith, nth)
        for unit in range(first, last):
            i = unit // channels
            c = unit - i * channels
            s = i // steps
            t = 16 * (i - s * steps)
            n = min(n_tokens - t, 16)
            x = address(p, 1) + c * nb(p, 1, 1) + s * nb(p, 1, 2) + 4 * t
            y = address(p, 0) + 4 * (c + channels * (t + n_tokens * s))
            total = along_time(x, address(p, 2) + c * nb(p, 2, 1), d_conv, n)
            recurrent_rows.store_lanes(y, 4 * channels, total, n)
    return k
