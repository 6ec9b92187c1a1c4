"""Along axis 0: norms, sums, softmax, order."""
from __future__ import annotations

from collections.abc import Callable

from ggraph.tensor import F32, I32, Tensor

from .table import check, op


def _norm(name: str, doc: str) -> Callable[[Tensor, float], Tensor]:
    def make(x: Tensor, eps: float) -> Tensor:
        return Tensor(name, F32, x.ne, (x,), {"eps": eps})
    make.__name__, make.__doc__ = name, doc + " over axis 0"
    return op(make)


norm = _norm("norm", "(x - mean) / sqrt(var + eps)")
rms_norm = _norm("rms_norm", "x / sqrt(mean(x^2) + eps)")
l2_norm = _norm("l2_norm", "x / max(sqrt(sum(x^2)), eps)")


@op
def group_norm(x: Tensor, n_groups: int, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) over each of `n_groups` groups of axis 2 (with axes 0 and 1)."""
    return Tensor("group_norm", F32, x.ne, (x,), {"n_groups": n_groups, "eps": eps})


@op
def sum_rows(x: Tensor) -> Tensor:
    """[n, ..] -> [1, ..]: the sum over axis 0."""
    return Tensor("sum_rows", F32, (1, *x.ne[1:]), (x,))


@op
def mean(x: Tensor) -> Tensor:
    """[n, ..] -> [1, ..]: the mean over axis 0."""
    return Tensor("mean", F32, (1, *x.ne[1:]), (x,))


@op
def cumsum(x: Tensor) -> Tensor:
    """Running sum along axis 0."""
    return Tensor("cumsum", F32, x.ne, (x,))


@op
def soft_max(x: Tensor, mask: Tensor | None = None, sinks: Tensor | None = None, scale: float = 1.0,
             max_bias: float = 0.0) -> Tensor:
    """softmax over axis 0 of x*scale + slope(head)*mask.

    x [n_kv, n_tokens, n_head, n_stream], mask F32/F16 [n_kv, n_tokens, 1, n_stream]; slope is 1 unless max_bias > 0
    (ALiBi). sinks F32 [n_head]: one more logit per head that takes part in the sum and yields nothing.
    """
    if mask is not None:
        check(mask.ne[0] == x.ne[0] and x.ne[1] == mask.ne[1], "soft_max: mask shape differs", x, mask)
    return Tensor("soft_max", F32, x.ne, (x, mask, sinks), {"scale": scale, "max_bias": max_bias})


@op
def argsort(x: Tensor, descending: bool = True) -> Tensor:
    """I32 order of each row; equal values keep the lower index first."""
    return Tensor("argsort", I32, x.ne, (x,), {"descending": descending})


@op
def top_k(x: Tensor, k: int) -> Tensor:
    """I32 [k, ..]: indices of the k largest of each row, largest first; equal values: the lower index first."""
    check(k <= x.ne[0], f"top_k: fewer than {k} values", x)
    return Tensor("top_k", I32, (k, *x.ne[1:]), (x,), {"k": k})


@op
def pool_1d(x: Tensor, k: int) -> Tensor:
    """The maximum of each k neighbours of axis 0: [n, ..] -> [n / k, ..]."""
    check(x.ne[0] % k == 0, f"pool_1d: rows are not multiples of {k}", x)
    return Tensor("pool_1d", F32, (x.ne[0] // k, *x.ne[1:]), (x,), {"k": k})
