"""Choosing a token: the cuts of a chain of samplers, and one draw. Weights are integers, so that their sums have no order."""
from __future__ import annotations

import numpy as np

from ggraph.ops import SAMPLE

from .arrays import Array, Operand
from .table import f32, kernel

ONE = f32(2.0 ** 36)            # the weight of the likeliest token
LEFT = {number: word for word, number in SAMPLE.items()}


@kernel
def sample(out: Operand, logits: Array, steps: Array, uniform: Array) -> Array:
    fractions = np.ascontiguousarray(uniform[0, 0]).view(np.uint64)[:, 0]
    tokens = [_token(row, chain, int(u)) for row, chain, u in zip(logits[0, 0], steps[0], fractions)]
    return np.array(tokens, np.int32).reshape(out.shape)


def _token(row: Array, steps: Array, fraction: int) -> int:
    """Candidates are ids in order: by number until something sorts them, likeliest first."""
    best = int(row.argmax())
    if not np.isfinite(row[best]):
        return -1
    x, ids, ordered = row.copy(), np.arange(len(row)), False
    for number, value in steps:
        word = LEFT[int(number)]
        if word in ("top_k", "top_p") and not ordered:
            ids, ordered = ids[np.argsort(-x[ids], kind="stable")], True
        if word == "end":
            break
        if word == "top_k":
            ids = ids[:int(value)]
        elif word == "top_p":
            reached = np.cumsum(weights(x[ids], x[best]))
            wanted = int(np.ceil(np.float64(value) * float(reached[-1])))
            ids = ids[:int(np.searchsorted(reached, np.uint64(wanted))) + 1]
        elif word == "min_p":
            ids = ids[(x[ids] >= x[best] + np.log(value)) | (ids == best)]
        elif word == "temp" and value > 0:
            x /= value
        elif word == "temp":
            ids = np.array([best])
        else:
            reached = np.cumsum(weights(x[ids], x[best]))
            return int(ids[np.searchsorted(reached, np.uint64(fraction * int(reached[-1]) >> 64), side="right")])
    return best


def weights(x: Array, best: Array) -> Array:
    """uint64: exp(x - best) in units of 2^-36."""
    return (np.exp((x - best).astype(np.float64)).astype(f32) * ONE + f32(0.5)).astype(np.uint64)
