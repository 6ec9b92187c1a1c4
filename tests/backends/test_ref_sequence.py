"""The reference kernels of rope, attention and recurrences against formulas that stand on their own, in float64."""
from __future__ import annotations

import cmath
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ggraph import ops
from ggraph.dtypes import F16, F32, Q8_0, DType
from tests.backends.small import INF, RNG, close, evaluate, normal, tensor, tensors

Array = Any


# --- rope ---------------------------------------------------------------------------------------------------------

def turned(x: Array, pairs: Sequence[tuple[int, int]], angles: Array, magnitude: float = 1.0) -> Array:
    """Pair i of each head of x [n_tokens, n_head, head] as a complex number times magnitude e^(i angles[token, i])."""
    y = x.astype(np.float64)
    for t in range(len(x)):
        for i, (a, b) in enumerate(pairs):
            z = (x[t, :, a] + 1j * x[t, :, b]) * magnitude * cmath.exp(1j * angles[t, i])
            y[t, :, a], y[t, :, b] = z.real, z.imag
    return y


def frequencies(n_dims: int, base: float) -> Array:
    return base ** (-np.arange(0, n_dims, 2) / n_dims)


POS = np.array([0, 1, 7, 300])


@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize("mode", [ops.NORMAL, ops.NEOX])
def test_rope_is_a_complex_rotation(mode: int, offset: int) -> None:
    x = normal(4, 2, 16)
    pairs = [(2 * i, 2 * i + 1) if mode == ops.NORMAL else (i, i + 6) for i in range(6)]
    pairs = [(offset + a, offset + b) for a, b in pairs]
    node = ops.rope(tensor(x), tensor(POS), None, n_dims=12, mode=mode, freq_base=1e4, offset=offset)
    close(evaluate(node), turned(x, pairs, np.outer(POS, frequencies(12, 1e4))), 1e-10)


def test_rope_factors_divide_and_scales_multiply() -> None:
    x, factors = normal(4, 2, 8), RNG.uniform(1, 4, 4)
    node = ops.rope(tensor(x), tensor(POS), tensor(factors), n_dims=8, mode=ops.NEOX, freq_base=500.0, freq_scale=0.25,
                    attn_factor=1.2)
    angles = np.outer(POS, frequencies(8, 500.0)) / factors.astype(np.float32) * 0.25
    close(evaluate(node), turned(x, [(i, i + 4) for i in range(4)], angles, np.float32(1.2)), 1e-10)


def test_yarn_stretches_slow_pairs_and_keeps_fast_ones() -> None:
    x, n_dims, base, n_ctx = normal(4, 2, 64), 64, 1e4, 2048
    node = ops.rope(tensor(x), tensor(POS), None, n_dims=n_dims, mode=ops.NORMAL, freq_base=base, freq_scale=0.25,
                    ext_factor=1.0, beta_fast=32, beta_slow=1, n_ctx_orig=n_ctx)
    f = frequencies(n_dims, base)
    turns = n_ctx * f / (2 * math.pi)                   # of each pair within the original context
    low, high = np.searchsorted(-turns, [-32, -1])      # first pair below 32 turns, first below 1
    low = low - 1                                       # YaRN rounds the fast end down and the slow end up
    stretch = np.clip((np.arange(32) - low) / (high - low), 0, 1)
    angles = np.outer(POS, f * (0.25 * stretch + 1 - stretch))
    assert turns[0] > 32 and turns[-1] < 1
    expected = turned(x, [(2 * i, 2 * i + 1) for i in range(32)], angles, 1 + 0.1 * math.log(4))
    close(evaluate(node), expected, 1e-10)


def axis_of(mode: int, sector: int, s: Sequence[int]) -> int:
    """Which of the four positions turns the pair of this sector, as the models that use the mode say."""
    if mode == ops.IMROPE:                              # t h w t h w .., each while its section lasts, then extra
        axis = sector % 3
        return axis if sector // 3 < s[axis] else 3
    return next(i for i in range(4) if sector < sum(s[:i + 1]) or i == 3)


@pytest.mark.parametrize(("mode", "n_dims", "sections"), [
    (ops.MROPE, 32, (4, 6, 6, 0)), (ops.MROPE, 32, (2, 3, 2, 1)), (ops.IMROPE, 32, (6, 5, 5, 0)),
    (ops.IMROPE, 24, (4, 3, 3, 2)), (ops.VISION, 16, (8, 8, 0, 0))])
def test_rope_with_several_positions(mode: int, n_dims: int, sections: tuple[int, ...]) -> None:
    x, pos = normal(4, 2, 32), RNG.integers(0, 50, (4, 4))
    node = ops.rope(tensor(x), tensor(pos.reshape(-1)), None, n_dims=n_dims, mode=mode, freq_base=1e4,
                    sections=sections)
    n_pairs = 16 if mode == ops.VISION else n_dims // 2
    f, angles = frequencies(n_dims, 1e4), np.zeros((4, n_pairs))
    for i in range(n_pairs):
        sector = i % sum(sections)
        axis = axis_of(mode, sector, sections)
        power = sector - sum(sections[:axis]) if mode == ops.VISION else i
        angles[:, i] = pos[axis] * f[power]
    close(evaluate(node), turned(x, [(i, i + n_pairs) for i in range(n_pairs)], angles), 1e-10)


def test_equal_positions_on_all_axes_are_plain_rope() -> None:
    x = tensor(normal(4, 2, 32))
    plain = evaluate(ops.rope(x, tensor(POS), None, n_dims=32, mode=ops.NEOX, freq_base=1e4))
    for mode in (ops.MROPE, ops.IMROPE):
        node = ops.rope(x, tensor(np.tile(POS, 4)), None, n_dims=32, mode=mode, freq_base=1e4, sections=(6, 5, 5, 0))
        np.testing.assert_array_equal(evaluate(node), plain)


# --- attention ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("options", [
    {}, {"max_bias": 8.0}, {"sinks": True}, {"logit_softcap": 3.0}, {"masked": False}], ids=str)
@pytest.mark.parametrize("type", [F32, F16, Q8_0])
def test_flash_attention_is_the_unfused_graph(type: DType, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGRAPH_REF", "exact")               # or the product with K rounds q
    options = dict(options)
    q, k, v = normal(2, 6, 5, 32), tensor(normal(2, 3, 16, 32), type), tensor(normal(2, 3, 16, 64), type)
    mask = tensor(np.where(np.tri(5, 16, 11) == 0, -INF, 0) + np.zeros((2, 1, 1, 1)), F16)
    seen = mask if options.pop("masked", True) else None
    sinks = tensor(normal(6)) if options.pop("sinks", False) else None
    fused = evaluate(ops.flash_attn_ext(tensor(q), k, v, seen, sinks, scale=0.2, **options))
    kq, cap = ops.mul_mat(k, tensor(q)), options.get("logit_softcap", 0.0)
    if cap:
        kq = ops.scale(ops.tanh(ops.scale(kq, 0.2 / cap)), cap)
    p = ops.soft_max(kq, seen, sinks, scale=1.0 if cap else 0.2, max_bias=options.get("max_bias", 0.0))
    values = ops.cont(ops.transpose(ops.cast(v, F32)))
    close(fused, evaluate(ops.permute(ops.mul_mat(values, p), (0, 2, 1, 3))), 1e-12)


def test_attention_by_hand() -> None:
    q = tensor(np.ones((2, 1, 1)))
    k, v = tensor(np.array([[[math.log(3)], [0], [50]]])), tensor(np.array([[[1.0, 0], [0, 1], [9, 9]]]))
    mask = tensor([[0, 0, -INF]])
    assert evaluate(ops.flash_attn_ext(q, k, v, mask, scale=1.0)) == pytest.approx(np.array([[.75, .25]] * 2))
    sinks = tensor([0.0, -INF])
    assert evaluate(ops.flash_attn_ext(q, k, v, mask, sinks, scale=1.0)) == pytest.approx(
        np.array([[.6, .2], [.75, .25]]))
    nothing = tensor([[-INF, -INF, -INF]])
    assert evaluate(ops.flash_attn_ext(q, k, v, nothing, scale=1.0)).tolist() == [[0, 0], [0, 0]]


# --- recurrences: the same sums as loops over numbers, in float64 -------------------------------------------------

def split_result(flat: Array, *shapes: tuple[int, ...]) -> list[Array]:
    ends = np.cumsum([math.prod(s) for s in shapes])
    assert ends[-1] == flat.size
    return [part.reshape(s) for part, s in zip(np.split(flat.reshape(-1), ends[:-1]), shapes)]


def test_ssm_conv_is_a_causal_convolution() -> None:
    x, weight = normal(2, 3, 9), normal(3, 4)
    got = evaluate(ops.ssm_conv(tensor(x), tensor(weight)))
    for s in range(2):
        for c in range(3):
            close(got[s, :, c], np.convolve(x[s, c].astype(np.float64), weight[c, ::-1], "valid"))


@pytest.mark.parametrize("mamba2", [False, True])
def test_ssm_scan(mamba2: bool) -> None:
    ns, nt, nh, dim, ds, ng = 2, 3, 4, 2, 3, 2
    s, x, dt = normal(5, nh, dim, ds), normal(ns, nt, nh, dim), normal(ns, nt, nh)
    A, B, C, ids = -np.exp(normal(nh, 1 if mamba2 else ds)), normal(ns, nt, ng, ds), normal(ns, nt, ng, ds), [3, 1]
    node = ops.OPS["ssm_scan"](*tensors(s, x, dt, A, B, C, ids), 4)
    y, states = split_result(evaluate(node), (ns, nt, nh, dim), (4, ns, nh, dim, ds))
    for i in range(ns):
        for h in range(nh):
            for d in range(dim):
                state = s[ids[i], h, d].astype(np.float64)
                close(states[3, i, h, d], state)                        # three tokens back: what came in
                for t in range(nt):
                    step = math.log1p(math.exp(dt[i, t, h]))
                    state = state * np.exp(step * A[h]) + step * x[i, t, h, d] * B[i, t, h // 2]
                    assert y[i, t, h, d] == pytest.approx(state @ C[i, t, h // 2], rel=1e-4, abs=1e-5)
                    close(states[nt - 1 - t, i, h, d], state)


@pytest.mark.parametrize("per_channel", [False, True])
def test_gated_delta_net(per_channel: bool) -> None:
    ns, nt, nk, nh, d = 2, 5, 2, 4, 3
    q, k, v = normal(ns, nt, nk, d), normal(ns, nt, nk, d) * 0.5, normal(ns, nt, nh, d)
    g, beta = -np.exp(normal(ns, nt, nh, d if per_channel else 1)), np.abs(normal(ns, nt, nh, 1)) / 2
    s = normal(ns, nh, d, d)
    node = ops.OPS["gated_delta_net"](*tensors(q, k, v, g, beta, s), 2)
    y, states = split_result(evaluate(node), (ns, nt, nh, d), (2, ns, nh, d, d))
    for i in range(ns):
        for h in range(nh):
            S = s[i, h].astype(np.float64).T                            # [key, value]
            for t in range(nt):
                key, query = k[i, t, h % nk].astype(np.float64), q[i, t, h % nk]
                S = np.exp(g[i, t, h])[:, None] * S
                S = S + np.outer(key, beta[i, t, h] * (v[i, t, h] - S.T @ key))
                close(y[i, t, h], S.T @ query / math.sqrt(d), 1e-10)
                if t >= nt - 2:
                    close(states[nt - 1 - t, i, h], S.T, 1e-10)


def test_linear_recurrences() -> None:
    ns, nt, nh, d = 2, 3, 2, 4
    a, b, c, w, e, f = (normal(ns * nt, nh, d) * 0.5 for _ in range(6))
    w, tf, s = 1 / (1 + np.exp(-w)), normal(nh, d), normal(ns, nh, d, d)
    flat = s.reshape(ns, -1)
    shapes = (ns * nt, nh, d), (ns, nh, d, d)
    y6, s6 = split_result(evaluate(ops.rwkv_wkv6(*tensors(a, b, c, tf, w, flat))), *shapes)
    y7, s7 = split_result(evaluate(ops.rwkv_wkv7(*tensors(c, w, a, b, e, f, flat))), *shapes)
    yg, sg = split_result(evaluate(ops.OPS["gated_linear_attn"](*tensors(a, b, c, w, flat), 0.25)), *shapes)
    for i in range(ns):
        for h in range(nh):
            S6, S7, Sg = (s[i, h].astype(np.float64) for _ in range(3))
            for t in range(i * nt, (i + 1) * nt):
                k, v, r, decay = (m[t, h].astype(np.float64) for m in (a, b, c, w))
                close(y6[t, h], r @ (S6 + tf[h][:, None] * np.outer(k, v)))
                S6 = decay[:, None] * S6 + np.outer(k, v)
                S7 = S7 * decay + np.outer(v, k) + np.outer(S7 @ e[t, h], f[t, h])
                close(y7[t, h], S7 @ r)
                Sg = decay[:, None] * Sg + np.outer(k, v)
                close(yg[t, h], 0.25 * r @ Sg)
            close(s6[i, h], S6)
            close(s7[i, h], S7)
            close(sg[i, h], Sg)
