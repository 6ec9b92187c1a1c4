"""Choosing a token of a row of logits."""
from __future__ import annotations

from ggraph.tensor import F32, I32, Tensor

from .table import check, op

SAMPLE = {"end": 0, "top_k": 1, "top_p": 2, "min_p": 3, "temp": 4, "dist": 5}          # words of a chain of samplers, by number


@op
def sample(logits: Tensor, steps: Tensor, uniform: Tensor) -> Tensor:
    """One token of each row of logits [n_vocab, n]: `steps` F32 [2, n_steps, n] are words of SAMPLE with their values, of each row
    those that run in order up to "end", which takes the best that is left; "dist" draws one, with `uniform` I32 [2, n], of each row
    a fraction of 2^64, low word first. -1 where a row's highest is not finite."""
    check(logits.type is F32 and steps.type is F32 and uniform.type is I32, "sample: types differ", logits, steps, uniform)
    fit = steps.ne[0] == uniform.ne[0] == 2 and uniform.ne[1] == steps.ne[2] == logits.ne[1]
    check(fit, "sample: shapes differ", logits, steps, uniform)
    return Tensor("sample", I32, (logits.ne[1],), (logits, steps, uniform))
