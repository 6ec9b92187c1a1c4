"""apertus: Apertus; Q and K normed per head, a feed-forward of xIELU without a gate, whose curve the file gives per layer."""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ggraph import ops
from ggraph.build import Builder
from ggraph.hparams import HParams, Keys
from ggraph.ops import NEOX
from ggraph.tensor import Tensor
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    return HParams.read(kv, rope_mode=NEOX)


def weights(t: Weights) -> None:
    t.embeddings(output=True)
    t.rope_factors()
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        w.norm("attn_q_norm", "attn_k_norm", n=t.hp.n_embd_head_k)
        w.unused("attn_q_norm.bias", "attn_k_norm.bias")
        w.qkv(il)
        w.attn_out(il)
        w.ffn(il, bias=False, gate=False)


def xielu(hp: HParams, x: Tensor, il: int) -> Tensor:
    """p x^2 + beta x above 0, n (e^min(x, eps) - 1 - x) + beta x below."""
    keys = Keys(hp.keys.kv, "xielu")
    n, p, beta, eps = (keys.per_layer(name, hp.n_layer, convert=float)[il] for name in ("alpha_n", "alpha_p", "beta", "eps"))
    curve = ops.scale(ops.sub(ops.expm1(ops.clamp(x, -math.inf, eps)), x), beta + softplus(n))
    curve = ops.mul(curve, ops.scale(ops.step(x), -1.0, 1.0))                     # at and below 0
    return ops.add(ops.add(ops.scale(ops.sqr(ops.relu(x)), softplus(p)), ops.scale(x, beta)), curve)


def softplus(x: float) -> float:
    return x if x > 20.0 else math.log1p(math.exp(x))


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        q, k = b.qk_norm(w, q, k, il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.linear(w.ffn_up, b.norm(x, w.ffn_norm, "ffn_norm", il), "ffn_up", il)
        y = b.linear(w.ffn_down, b.cb(xielu(b.hp, y, il), "ffn_xielu", il), "ffn_down", il)
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
