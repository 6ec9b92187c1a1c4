"""Matrix products and triangular systems: weights are unpacked to float32, sums are in float32.

A product with F16, BF16 or quantized rows rounds its other operand to the type that ggml's does: that is part of what
the op means, and decides close calls (which expert, which token). With GGRAPH_REF=exact nothing is rounded.
"""
from __future__ import annotations

import numpy as np

from ggraph import env, quants
from ggraph.dtypes import F32

from .arrays import Array, Operand, row_numbers
from .table import kernel, placed


def read_for(a: Operand, b: Operand) -> Array:
    """Elements of b as a product with rows of a sees them."""
    x, type = b.read(), quants.dot_type(a.type)
    if type in (F32, b.type) or env.get("GGRAPH_REF") == "exact":
        return x
    return quants.unpack(quants.pack(x, type), type)


@placed
def mul_mat(out: Operand, a: Operand, b: Operand) -> Array:
    """a [a3, a2, n, k], b [b3, b2, m, k] -> [b3, b2, m, n]; each matrix of a serves b2/a2 (b3/a3) neighbours of b."""
    w, x = a.read(), read_for(a, b)
    n3, n2 = w.shape[:2]
    b3, b2, m, k = x.shape
    grouped = x.reshape(n3, b3 // n3, n2, b2 // n2, m, k)
    return np.matmul(grouped, w[:, None, :, None].swapaxes(-1, -2)).reshape(out.shape)


@placed
def mul_mat_id(out: Operand, a: Operand, b: Operand, ids: Operand) -> Array:
    """Token t, slot s: expert ids[t, s] times b[t, s]. Only the experts that occur are unpacked."""
    x, expert = read_for(a, b)[0], row_numbers(ids.view()[0, 0], a.ne[2], out.tensor)
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
