"""Data moved and not computed with: views of the same bytes, copies, rows read and written, tensors joined and filled."""
from __future__ import annotations

import math
from collections.abc import Sequence

from ggraph.dtypes import DType
from ggraph.size import Size
from ggraph.tensor import F32, I32, Tensor, pad4

from .table import check, op

# --- views: other shape, same bytes -------------------------------------------------------------------------------

def _view(name: str, x: Tensor, ne: Sequence[int], nb: Sequence[int] | None, offs: int = 0) -> Tensor:
    return Tensor(name, x.type, ne, (x,), nb=nb, view_src=x.root, view_offs=x.view_offs + offs)


@op
def view(x: Tensor, ne: Sequence[int], nb: Sequence[int] = (), offset: int = 0) -> Tensor:
    """A window of x: shape `ne`, byte strides `nb` of axes 1.. (contiguous if not given), byte offset."""
    return _view("view", x, ne, (x.nb[0], *nb) if nb else None, offset)


@op
def reshape(x: Tensor, ne: Sequence[int]) -> Tensor:
    """The same elements in shape `ne`; x must be contiguous."""
    n = pad4(ne)
    check(x.contiguous, "reshape of a tensor that is not contiguous", x)
    check(x.numel == n[0] * n[1] * n[2] * n[3], "reshape changes the number of elements", x)
    return _view("reshape", x, n, None)


@op
def permute(x: Tensor, axes: Sequence[int]) -> Tensor:
    """Axis i of x becomes axis axes[i] of the result, as ggml_permute."""
    ne, nb = [0] * 4, [0] * 4
    for i, a in enumerate(axes):
        ne[a], nb[a] = x.ne[i], x.nb[i]
    return _view("permute", x, ne, nb)


@op
def transpose(x: Tensor) -> Tensor:
    """Axes 0 and 1 change places."""
    n, b = x.ne, x.nb
    return _view("transpose", x, (n[1], n[0], n[2], n[3]), (b[1], b[0], b[2], b[3]))


# --- moving data --------------------------------------------------------------------------------------------------

def _four(amounts: Sequence[int]) -> tuple[int, ...]:
    """One amount for each axis; those of missing axes are 0."""
    return (*amounts, *(0,) * (4 - len(amounts)))


@op
def cont(x: Tensor, ne: Sequence[int] | None = None) -> Tensor:
    """A contiguous copy, of another shape if given."""
    return Tensor("cont", x.type, x.ne if ne is None else ne, (x,))


@op
def cast(x: Tensor, type: DType) -> Tensor:
    """A contiguous copy in another type; quantized types are rounded to."""
    return Tensor("cast", type, x.ne, (x,))


@op
def cpy(x: Tensor, dst: Tensor) -> Tensor:
    """Write x into dst (any strides, type converted); the result is dst."""
    check(x.numel == dst.numel, "cpy between different numbers of elements", x, dst)
    return Tensor("cpy", dst.type, dst.ne, (x, dst), nb=dst.nb, view_src=dst.root, view_offs=dst.view_offs)


@op
def get_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x [n, m, b2, b3], rows I32 [r, b2, b3] -> F32 [n, r, b2, b3] (I32 stays I32)."""
    check(rows.type is I32, "row numbers must be I32", rows)
    check(x.ne[2] == rows.ne[1] and x.ne[3] == rows.ne[2], "get_rows: batch axes differ", x, rows)
    return Tensor("get_rows", I32 if x.type is I32 else F32, (x.ne[0], rows.ne[0], rows.ne[1], rows.ne[2]), (x, rows))


@op
def set_rows(dst: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    """dst[:, rows[i]] = x[:, i] with conversion to dst's type; the result is dst."""
    check(dst.ne[0] == x.ne[0] and dst.ne[2:] == x.ne[2:] and x.ne[1] == rows.ne[0], "set_rows: shapes differ", dst, x)
    check(x.ne[2] % rows.ne[1] == 0 and x.ne[3] % rows.ne[2] == 0, "set_rows: row numbers do not repeat", x, rows)
    return Tensor("set_rows", dst.type, dst.ne, (dst, x, rows), nb=dst.nb, view_src=dst.root, view_offs=dst.view_offs)


@op
def concat(a: Tensor, b: Tensor, axis: int) -> Tensor:
    """a and b joined along axis `axis`; the other axes and the type are the same."""
    check(a.type is b.type, "concat: types differ", a, b)
    check(all(x == y for i, (x, y) in enumerate(zip(a.ne, b.ne)) if i != axis), "concat: shapes differ", a, b)
    ne = list(a.ne)
    ne[axis] = a.ne[axis] + b.ne[axis]
    return Tensor("concat", a.type, ne, (a, b), {"axis": axis})


@op
def repeat(x: Tensor, ne: Sequence[int]) -> Tensor:
    """Tile x to shape `ne`."""
    return Tensor("repeat", x.type, ne, (x,))


@op
def fill(x: Tensor, value: float) -> Tensor:
    """A tensor of x's shape that holds `value` everywhere."""
    return Tensor("fill", F32, x.ne, (x,), {"value": value})


@op
def arange(start: float, stop: float, step: float) -> Tensor:
    """F32 [n]: start, start + step, .. below stop."""
    check(not any(isinstance(x, Size) for x in (start, stop, step)), "arange needs constants: fill an input instead")
    return Tensor("arange", F32, (math.ceil((stop - start) / step),), (), {"start": start, "step": step})


@op
def pad(x: Tensor, right: Sequence[int], left: Sequence[int] = (0, 0, 0, 0)) -> Tensor:
    """x between `left` and `right` zeros along each axis."""
    check(not any(isinstance(n, Size) for n in left), "pad: the left side depends on the batch", x)
    ne = [n + a + b for n, a, b in zip(x.ne, _four(left), _four(right))]
    return Tensor("pad", F32, ne, (x,), {"left": _four(left)})


@op
def roll(x: Tensor, shifts: Sequence[int]) -> Tensor:
    """Element i of an axis moves to i + shift, what leaves the end comes in at the start."""
    check(not any(isinstance(n, Size) for n in shifts), "roll: a shift depends on the batch", x)
    return Tensor("roll", F32, x.ne, (x,), {"shifts": _four(shifts)})


@op
def diag(x: Tensor) -> Tensor:
    """x [n, 1, b2, b3] -> [n, n, b2, b3] with x on the diagonal and zeros beside it."""
    check(x.ne[1] == 1, "diag: x is not a row", x)
    return Tensor("diag", F32, (x.ne[0], x.ne[0], x.ne[2], x.ne[3]), (x,))


@op
def tri(x: Tensor, *, lower: bool, diag: bool) -> Tensor:
    """Keep the lower (axis 0 below axis 1) or upper triangle of x [n, n, b2, b3], with or without the diagonal."""
    check(x.ne[0] == x.ne[1], "tri: x is not square", x)
    return Tensor("tri", F32, x.ne, (x,), {"lower": lower, "diag": diag})
