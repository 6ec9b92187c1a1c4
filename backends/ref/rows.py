"""Ops over rows (axis 0 of `ne`, the last in NumPy): norms, sums, maxima, softmax, sorting."""
from __future__ import annotations

import math

import numpy as np

from .arrays import Array, Operand, tile
from .table import f32, kernel


@kernel
def norm(out: Operand, x: Array) -> Array:
    y = x - x.mean(axis=-1, keepdims=True)
    return y / np.sqrt(np.square(y).mean(axis=-1, keepdims=True) + f32(out.params["eps"]))


@kernel
def rms_norm(out: Operand, x: Array) -> Array:
    return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + f32(out.params["eps"]))


@kernel
def l2_norm(out: Operand, x: Array) -> Array:
    return x / np.maximum(np.sqrt(np.square(x).sum(axis=-1, keepdims=True)), f32(out.params["eps"]))


@kernel
def group_norm(out: Operand, x: Array) -> Array:
    """Groups are runs of ceil(ne2 / n_groups) channels; the last may be shorter."""
    result = np.empty_like(x)
    step = -(-x.shape[1] // out.params["n_groups"])
    for start in range(0, x.shape[1], step):
        y = x[:, start:start + step]
        y = y - y.mean(axis=(1, 2, 3), keepdims=True)
        var = np.square(y).mean(axis=(1, 2, 3), keepdims=True)
        result[:, start:start + step] = y / np.sqrt(var + f32(out.params["eps"]))
    return result


@kernel
def sum_rows(out: Operand, x: Array) -> Array:
    return x.sum(axis=-1, keepdims=True)


@kernel
def mean(out: Operand, x: Array) -> Array:
    return x.mean(axis=-1, keepdims=True)


@kernel
def cumsum(out: Operand, x: Array) -> Array:
    return np.cumsum(x, axis=-1, dtype=np.float32)


def alibi_slopes(n_head: int, max_bias: float) -> Array:
    """Factor of the mask for each head: 1 without ALiBi, else a geometric series, interleaved above a power of 2."""
    if max_bias <= 0:
        return np.ones(n_head, np.float32)
    n = 1 << int(math.log2(n_head))
    return np.array([2 ** (-max_bias / n * (h + 1)) if h < n else 2 ** (-max_bias / 2 / n * (2 * (h - n) + 1))
                     for h in range(n_head)], np.float32)


def softmax(x: Array, sinks: Array | None = None) -> Array:
    """Over the last axis; `sinks`, shaped to broadcast, is one more logit. A row of -inf alone gives zeros."""
    top = x.max(axis=-1, keepdims=True, initial=-np.inf)
    top = top if sinks is None else np.maximum(top, sinks)
    top = np.where(np.isneginf(top), f32(0), top)
    e = np.exp(x - top)
    total = e.sum(axis=-1, keepdims=True)
    total = total if sinks is None else total + np.exp(sinks - top)
    return np.divide(e, total, out=np.zeros_like(e), where=total != 0)


@kernel
def soft_max(out: Operand, x: Array, mask: Array | None, sinks: Array | None) -> Array:
    n_head = x.shape[1]
    logits = x * f32(out.params["scale"])
    if mask is not None:
        slopes = alibi_slopes(n_head, out.params["max_bias"]).reshape(n_head, 1, 1)
        logits = logits + slopes * tile(mask, x.shape)
    return softmax(logits, None if sinks is None else sinks.reshape(n_head, 1, 1))


@kernel
def pool_1d(out: Operand, x: Array) -> Array:
    return x.reshape(*out.shape, out.params["k"]).max(axis=-1)


@kernel
def argsort(out: Operand, x: Array) -> Array:
    return np.argsort(-x if out.params["descending"] else x, axis=-1, kind="stable")


@kernel
def top_k(out: Operand, x: Array) -> Array:
    return np.argsort(-x, axis=-1, kind="stable")[..., :out.params["k"]]


@kernel
def hadamard(out: Operand, x: Array) -> Array:
    n = out.params["n"]
    y = x.reshape(*x.shape[:-1], -1, n)
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (y @ (matrix * f32(n ** -0.5))).reshape(x.shape)
