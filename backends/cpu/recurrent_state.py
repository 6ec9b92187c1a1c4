"""Where a recurrence finds the states of a sequence and where it leaves them: in rows by number, or one behind the other.

Comes in: parameter blocks, with the tensors numbered as given. Goes out: addresses. Must not know: what a state holds.
"""
from __future__ import annotations

from .kernel import inline, simd
from .layout import address, nb, ne

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

BAD_ROW = 1             # error code of a kernel that met a row number outside its tensor


def state_row(states, numbers):
    """f(p, s, back): the address of sequence s's row of tensor `states`, 0 if there is none. `back`: 0 for the last state, 1 for
    the one before it, ... `numbers`: the tensor of row numbers [n_seqs, ..], None where the rows [n_seqs, ..] themselves are
    in that order."""
    @inline
    def numbered(p, s, back):
        i = simd.get_i32(address(p, numbers) + s * nb(p, numbers, 0) + back * nb(p, numbers, 1))
        if i < 0 or i >= ne(p, states, 1):
            simd.fail(BAD_ROW)
            return 0
        return address(p, states) + i * nb(p, states, 1)

    @inline
    def plain(p, s, back):
        return address(p, states) + s * nb(p, states, 1) + back * nb(p, states, 2)
    return plain if numbers is None else numbered


@inline
def copy_block(src, dst, nbytes):
    """A multiple of 64 bytes."""
    for j in range(0, nbytes, 64):
        simd.store_bytes(dst + j, simd.load_bytes(src + j))


def keeping(row_to, in_rows):
    """(before, after): copies of states that later tokens will change, or that there are too few tokens for. The latter go
    nowhere where rows have numbers: nobody wants them."""
    @inline
    def before(p, s, start, old, nbytes, n_tokens, n_kept):
        if not in_rows:
            for back in range(n_tokens, n_kept):
                copy_block(old, row_to(p, s, back) + start, nbytes)

    @inline
    def after(p, s, start, new, nbytes, back, n_kept):
        if 0 < back < n_kept:
            row = row_to(p, s, back)
            if row != 0:
                copy_block(new, row + start, nbytes)
    return before, after
