"""Where a recurrence finds the states of a sequence and where it leaves them: in rows by number, or one behind the other.

Comes in: parameter blocks, with the tensors numbered as given. Goes out: addresses. Must not know: what a state holds.
"""
from __future__ import annotations

from .kernel import inline, simd
from .layout import address, nb, ne

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

BAD_ROW = 1             # error code of a kernel that met a row number outside its tensor


def state_row(states, numbers):
    """f(p, s): the address of sequence s's row of tensor `states`, 0 if there is none; `numbers`: the tensor of row numbers,
    None where row s is meant."""
    @inline
    def numbered(p, s):
        i = simd.get_i32(address(p, numbers) + s * nb(p, numbers, 0))
        if i < 0 or i >= ne(p, states, 1):
            simd.fail(BAD_ROW)
            return 0
        return address(p, states) + i * nb(p, states, 1)

    @inline
    def plain(p, s):
        return address(p, states) + s * nb(p, states, 1)
    return plain if numbers is None else numbered


@inline
def copy_block(src, dst, nbytes):
    """A multiple of 64 bytes."""
    for j in range(0, nbytes, 64):
        simd.store_bytes(dst + j, simd.load_bytes(src + j))


@inline
def keep_before(old, new, stride, nbytes, n_tokens, n_kept):
    """Fill the places of states from before the first token; the last state stands at `new`, earlier ones `stride` apart."""
    for back in range(n_tokens, n_kept):
        copy_block(old, new + back * stride, nbytes)


@inline
def keep_after(new, stride, nbytes, back, n_kept):
    """Keep a copy of the state that `back` more tokens will change."""
    if 0 < back < n_kept:
        copy_block(new, new + back * stride, nbytes)
