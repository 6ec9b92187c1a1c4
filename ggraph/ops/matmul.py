"""Matrix products."""
from __future__ import annotations

from ggraph.tensor import F32, Tensor

from .table import check, op


@op
def mul_mat(a: Tensor, b: Tensor) -> Tensor:
    """a [k, n, a2, a3] (any type), b F32 [k, m, b2, b3], b2 % a2 == b3 % a3 == 0 -> F32 [n, m, b2, b3]."""
    check(a.ne[0] == b.ne[0], "mul_mat: inner axes differ", a, b)
    check(b.ne[2] % a.ne[2] == 0 and b.ne[3] % a.ne[3] == 0, "mul_mat: cannot broadcast", a, b)
    return Tensor("mul_mat", F32, (a.ne[1], b.ne[1], b.ne[2], b.ne[3]), (a, b))


@op
def mul_mat_id(a: Tensor, b: Tensor, ids: Tensor) -> Tensor:
    """a [k, n, n_expert], b F32 [k, n_used or 1, n_tokens], ids I32 [n_used, n_tokens] -> F32 [n, n_used, n_tokens]."""
    check(a.ne[0] == b.ne[0] and b.ne[2] == ids.ne[1], "mul_mat_id: shapes differ", a, b, ids)
    return Tensor("mul_mat_id", F32, (a.ne[1], ids.ne[0], b.ne[2]), (a, b, ids))


@op
def out_prod(a: Tensor, b: Tensor) -> Tensor:
    """a [n, k, ..], b [m, k, ..] -> [n, m, ..]: the sum over k of outer products."""
    check(a.ne[1] == b.ne[1], "out_prod: inner axes differ", a, b)
    check(b.ne[2] % a.ne[2] == 0 and b.ne[3] % a.ne[3] == 0, "out_prod: cannot broadcast", a, b)
    return Tensor("out_prod", F32, (a.ne[0], b.ne[0], b.ne[2], b.ne[3]), (a, b))


@op
def solve_tri(a: Tensor, b: Tensor) -> Tensor:
    """x [m, n, ..] with a x = b, where b is [m, n, ..] and of a [n, n, ..] only the lower triangle is read."""
    check(a.ne[0] == a.ne[1] == b.ne[1] and a.ne[2:] == b.ne[2:], "solve_tri: shapes differ", a, b)
    return Tensor("solve_tri", F32, b.ne, (a, b))
