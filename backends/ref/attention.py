"""Attention as one op, one KV head at a time, with float32 everywhere."""
from __future__ import annotations

import numpy as np

from .arrays import Array, Operand
from .rows import alibi_slopes, softmax
from .table import f32, kernel


@kernel
def flash_attn_ext(out: Operand, q: Array, k: Array, v: Array, mask: Array | None, sinks: Array | None,
                   cells: Array | None, spans: Array | None) -> Array:
    """q [n_stream, n_head, n_tokens, dk] -> [n_stream, n_tokens, n_head, dv]; `cells` and `spans` repeat the mask."""
    n_stream, n_head = q.shape[:2]
    slopes = alibi_slopes(n_head, out.params["max_bias"])
    result = np.empty(out.shape, np.float32)
    for s in range(n_stream):
        for h in range(n_head):
            logits = _logits(out, q[s, h], k[s, h * k.shape[1] // n_head])
            if mask is not None:
                logits = logits + slopes[h] * mask[s % mask.shape[0], h % mask.shape[1]]
            p = softmax(logits, None if sinks is None else sinks[0, 0, 0, h])
            result[s, :, h] = p @ v[s, h * v.shape[1] // n_head]
    return result


def _logits(out: Operand, q: Array, k: Array) -> Array:
    """q [n_tokens, dk], k [n_kv, dk] -> [n_tokens, n_kv], scaled and capped."""
    cap = out.params["logit_softcap"]
    if not cap:
        return q @ k.T * f32(out.params["scale"])
    return f32(cap) * np.tanh(q @ k.T * f32(out.params["scale"] / cap))
