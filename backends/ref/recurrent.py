"""Recurrences, one token after the other; heads and sequences side by side.

Every kernel returns the outputs of all tokens followed by the new states, in the flat order that `ops` describes.
"""
from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from .arrays import Array, Operand, row_numbers
from .elementwise import softplus
from .table import f32, kernel


@kernel
def ssm_conv(out: Operand, x: Array, weight: Array) -> Array:
    """x [1, n_seqs, d_inner, d_conv - 1 + n_tokens], weight [1, 1, d_inner, d_conv]."""
    windows = np.lib.stride_tricks.sliding_window_view(x, weight.shape[-1], axis=-1)
    return (windows * weight[0, 0, :, None]).sum(axis=-1).swapaxes(-1, -2)


@kernel
def ssm_scan(out: Operand, s: Array, x: Array, dt: Array, A: Array, B: Array, C: Array, ids: Array) -> Array:
    """s [rows, n_head, dim, d_state], x [n_seqs, n_tokens, n_head, dim], B, C [n_seqs, n_tokens, n_group, d_state]."""
    n_head = x.shape[2]
    state = s[row_numbers(ids[0, 0, 0], len(s), out.tensor)]
    dt, A = softplus(dt[0]), A[0, 0, :, None]
    B, C = (np.repeat(m, n_head // m.shape[2], axis=2)[:, :, :, None] for m in (B, C))
    outputs, states = [], [state]
    for t in range(x.shape[1]):
        step = dt[:, t, :, None, None]
        state = state * np.exp(step * A) + step * x[:, t, ..., None] * B[:, t]
        outputs.append((state * C[:, t]).sum(axis=-1))
        states.append(state)
    return _result(out, outputs, _snapshots(states, out.params["n_snapshots"]))


@kernel
def gated_delta_net(out: Operand, q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array) -> Array:
    """v [n_seqs, n_tokens, n_head, d], q and k with fewer heads, state [n_seqs, n_head, d of v, d of k]."""
    n_tokens, n_head, d = v.shape[1:]
    q, k = (np.tile(m, (1, 1, n_head // m.shape[2], 1)) for m in (q, k))
    decay, scale = np.exp(g), f32(1 / math.sqrt(d))
    outputs, states = [], [state]
    for t in range(n_tokens):
        state = state * decay[:, t, :, None]
        delta = (v[:, t] - _apply(state, k[:, t])) * beta[:, t]
        state = state + _outer(delta, k[:, t])
        outputs.append(_apply(state, q[:, t]) * scale)
        states.append(state)
    return _result(out, outputs, _snapshots(states, out.params["n_snapshots"]))


@kernel
def rwkv_wkv6(out: Operand, k: Array, v: Array, r: Array, tf: Array, td: Array, state: Array) -> Array:
    """State [n_seqs, n_head, d of k, d of v]."""
    state, (k, v, r, td) = _sequences(state, k, v, r, td)
    outputs = []
    for t in range(k.shape[1]):
        kv = _outer(k[:, t], v[:, t])
        outputs.append(_apply((state + tf[0, 0, ..., None] * kv).swapaxes(-1, -2), r[:, t]))
        state = state * td[:, t, ..., None] + kv
    return _result(out, outputs, [state])


@kernel
def gated_linear_attn(out: Operand, k: Array, v: Array, q: Array, g: Array, state: Array) -> Array:
    """State [n_seqs, n_head, d of k, d of v]."""
    state, (k, v, q, g) = _sequences(state, k, v, q, np.broadcast_to(g, k.shape))
    outputs = []
    for t in range(k.shape[1]):
        state = state * g[:, t, ..., None] + _outer(k[:, t], v[:, t])
        outputs.append(_apply(state.swapaxes(-1, -2), q[:, t] * f32(out.params["scale"])))
    return _result(out, outputs, [state])


@kernel
def rwkv_wkv7(out: Operand, r: Array, w: Array, k: Array, v: Array, a: Array, b: Array, state: Array) -> Array:
    """State [n_seqs, n_head, d of v, d of k]."""
    state, (r, w, k, v, a, b) = _sequences(state, r, w, k, v, a, b)
    outputs = []
    for t in range(k.shape[1]):
        state = state * w[:, t, :, None] + _outer(v[:, t], k[:, t]) + _outer(_apply(state, a[:, t]), b[:, t])
        outputs.append(_apply(state, r[:, t]))
    return _result(out, outputs, [state])


def _apply(m: Array, x: Array) -> Array:
    """Matrices [.., i, j] times vectors [.., j]."""
    return np.matmul(m, x[..., None])[..., 0]


def _outer(x: Array, y: Array) -> Array:
    """[.., i], [.., j] -> [.., i, j]."""
    return x[..., None] * y[..., None, :]


def _sequences(state: Array, *tokens: Array) -> tuple[Array, list[Array]]:
    """[1, tokens of all, n_head, d] each -> [n_seqs, tokens of one, n_head, d]; the state to [n_seqs, n_head, d, d]."""
    n_seqs, (n_head, d) = state.shape[2], tokens[0].shape[2:]
    return state.reshape(n_seqs, n_head, d, d), [x.reshape(n_seqs, -1, n_head, d) for x in tokens]


def _snapshots(states: list[Array], n: int) -> list[Array]:
    """The last n states, latest first, filled up with the one that came in."""
    return states[:-n - 1:-1] + [states[0]] * (n - len(states))


def _result(out: Operand, outputs: list[Array], states: Iterable[Array]) -> Array:
    """`outputs`, one [n_seqs, n_head, d] per token, to [n_seqs, n_tokens, n_head, d], then the states."""
    tokens = np.stack(outputs, axis=1) if outputs else np.empty(0, np.float32)
    return np.concatenate([tokens.reshape(-1), *(s.reshape(-1) for s in states)]).reshape(out.shape)
