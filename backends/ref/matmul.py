"""Matrix products and triangular systems: weights are unpacked to float32, sums are in float32."""
from __future__ import annotations

import numpy as np

from .arrays import Array, Operand, row_numbers
from .table import kernel, placed


@kernel
def mul_mat(out: Operand, a: Array, b: Array) -> Array:
    """a [a3, a2, n, k], b [b3, b2, m, k] -> [b3, b2, m, n]; each matrix of a serves b2/a2 (b3/a3) neighbours of b."""
    n3, n2 = a.shape[:2]
    b3, b2, m, k = b.shape
    grouped = b.reshape(n3, b3 // n3, n2, b2 // n2, m, k)
    return np.matmul(grouped, a[:, None, :, None].swapaxes(-1, -2)).reshape(out.shape)


@placed
def mul_mat_id(out: Operand, a: Operand, b: Operand, ids: Operand) -> Array:
    """Token t, slot s: expert ids[t, s] times b[t, s]. Only the experts that occur are unpacked."""
    x, expert = b.read()[0], row_numbers(ids.view()[0, 0], a.ne[2], out.tensor)
    x = np.broadcast_to(x, (*expert.shape, a.ne[0]))
    result = np.empty(out.shape, np.float32)
    for e in np.unique(expert):
        token, slot = np.nonzero(expert == e)
        result[0, token, slot] = x[token, slot] @ a.read_matrix(int(e)).T
    return result


@kernel
def solve_tri(out: Operand, a: Array, b: Array) -> Array:
    """a [.., n, n], b [.., n, m]: forward substitution, row by row."""
    x = np.empty(out.shape, np.float32)
    for i in range(a.shape[-1]):
        known = np.matmul(a[..., i:i + 1, :i], x[..., :i, :])[..., 0, :]
        x[..., i, :] = (b[..., i, :] - known) / a[..., i, i, None]
    return x


@kernel
def out_prod(out: Operand, a: Array, b: Array) -> Array:
    """a [.., k, n], b [.., k, m] -> [.., m, n]."""
    n3, n2, k = a.shape[:3]
    b3, b2, _, m = b.shape
    grouped = b.reshape(n3, b3 // n3, n2, b2 // n2, k, m).swapaxes(-1, -2)
    return np.matmul(grouped, a[:, None, :, None]).reshape(out.shape)
