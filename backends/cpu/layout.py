"""Where elements lie: what a lowering may rely on, and how a kernel finds its rows.

Comes in: tensors (for lowerings), the address of a parameter block (for kernels). Goes out: facts and addresses.
Must not know: ops. In a parameter block a tensor is 9 words: address, ne[4], nb[4]; `t` counts tensors from the start.
Sizes are read when a kernel runs, and strides of axes of one element are never trusted.
"""
from __future__ import annotations

from ggraph import dtypes
from ggraph.tensor import Tensor

from .kernel import inline, simd

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

ANYHOW, TOKENS, COLUMNS = range(3)                      # how a step is cut: as its kernel likes, or alike with others
CHUNK = 1024            # elements of a row that one thread takes at a time, where rows can be cut


# For lowerings. What they return must not depend on the sizes of the batch at hand.

def in_rows(*tensors: Tensor) -> bool:
    """The elements of each row lie side by side."""
    return all(t.nb[0] == t.type.nbytes or t.ne[0] == 1 for t in tensors)


def f32_rows(*tensors: Tensor) -> bool:
    """F32, the elements of each row side by side."""
    return all(t.type is dtypes.F32 for t in tensors) and in_rows(*tensors)


def shaped(x: Tensor, ne: tuple[int, ...]) -> Tensor:
    """The same bytes of a contiguous tensor in another shape."""
    return Tensor("reshape", x.type, ne, (x,), view_src=x.root, view_offs=x.view_offs)


# For kernels.

@inline
def share(n, ith, nth):
    """First and one past the last of this thread's part of n things."""
    return n * ith // nth, n * (ith + 1) // nth


@inline
def window(p, t, how, ith, nth):
    """This thread's part of tensor t, cut as `join` says: its first row and one past the last, the same of columns."""
    if how == COLUMNS:
        first, last = share((ne(p, t, 0) + 31) // 32, ith, nth)
        return 0, n_rows(p, t), 32 * first, min(32 * last, ne(p, t, 0))
    first, last = share(n_rows(p, t), ith, nth)
    return first, last, 0, ne(p, t, 0)


@inline
def address(p, t):
    return simd.word(p, 9 * t)


@inline
def ne(p, t, axis):
    return simd.word(p, 9 * t + 1 + axis)


@inline
def nb(p, t, axis):
    return simd.word(p, 9 * t + 5 + axis)


@inline
def n_rows(p, t):
    return ne(p, t, 1) * ne(p, t, 2) * ne(p, t, 3)


@inline
def unravel(p, t, r):
    """Row r, counted through tensor t, as its indices along axes 1, 2, 3."""
    n1, n2 = ne(p, t, 1), ne(p, t, 2)
    if r < n1:
        return r, 0, 0
    q = r // n1
    i3 = q // n2 if q >= n2 else 0
    return r - q * n1, q - i3 * n2, i3


@inline
def _step(p, t, axis, i):
    """Bytes from index 0 to index i of an axis along which the tensor repeats."""
    n = ne(p, t, axis)
    if i >= n:
        i = i % n if n > 1 else 0
    return i * nb(p, t, axis)


@inline
def row(p, t, i1, i2, i3):
    """Address of row (i1, i2, i3) of tensor t, which repeats along these axes as often as need be."""
    return address(p, t) + _step(p, t, 1, i1) + _step(p, t, 2, i2) + _step(p, t, 3, i3)


@inline
def contiguous(p, t, row_bytes):
    """Whether the rows of tensor t lie one behind the other."""
    a = row_bytes * ne(p, t, 1)
    b = a * ne(p, t, 2)
    return ((ne(p, t, 1) == 1 or nb(p, t, 1) == row_bytes) and (ne(p, t, 2) == 1 or nb(p, t, 2) == a)
            and (ne(p, t, 3) == 1 or nb(p, t, 3) == b))
