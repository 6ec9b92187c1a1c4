"""Moving data: copies, casts, rows by number. Bytes move as they are where no type changes."""
from __future__ import annotations

import numpy as np

from .arrays import Array, Operand, pack, row_numbers
from .table import placed


def _copy(out: Operand, x: Operand) -> Array | None:
    """x in the shape and type of out. A quantized tensor is not rounded again when its type stays."""
    if out.type is x.type and not x.type.plain:
        blocks = out.blocks()
        blocks[...] = x.blocks().reshape(blocks.shape)
        return None
    return x.read().reshape(out.shape)


@placed
def cont(out: Operand, x: Operand) -> Array | None:
    return _copy(out, x)


@placed
def cast(out: Operand, x: Operand) -> Array | None:
    return _copy(out, x)


@placed
def cpy(out: Operand, x: Operand, dst: Operand) -> Array | None:
    """`out` is `dst`: same bytes, same strides."""
    return _copy(out, x)


@placed
def get_rows(out: Operand, x: Operand, rows: Operand) -> Array:
    _, n3, n2, n_rows = rows.shape
    index = row_numbers(rows.view().reshape(n3, n2, n_rows), x.ne[1], out.tensor)
    if n2 == n3 == 1:
        return x.read_rows(index[0, 0])
    elements = x.read()
    return elements[np.arange(n3)[:, None, None], np.arange(n2)[:, None], index]


@placed
def set_rows(out: Operand, dst: Operand, x: Operand, rows: Operand) -> None:
    """In place: `out` is `dst`, and only the rows named are written."""
    n3, n2 = x.shape[:2]
    index = row_numbers(rows.view(), out.ne[1], out.tensor)
    index = np.tile(index[0], (n3 // index.shape[1], n2 // index.shape[2], 1))
    where = np.arange(n3)[:, None, None], np.arange(n2)[:, None], index
    if out.type.plain:
        out.view()[where] = x.read()
    else:
        out.blocks()[where] = pack(out, x.read())
