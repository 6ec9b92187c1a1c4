"""minimax-01: MiniMax Text 01; lightning attention (linear, fading), in one layer of eight softmax attention, experts.

The residual of a block is its normed input, scaled.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph import ops
from ggraph.build import Builder
from ggraph.build.core import split
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.tensor import Tensor
from ggraph.weights import Group, Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX)
    return hp.recurrent(hp.recurrent_pattern(8), n_embd_r=0, n_embd_s=hp.n_embd_head_k ** 2 * hp.n_head[0],
                        f_residual_scale=float(hp.keys.number("residual_scale")))


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings()
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        n = hp.n_embd_head_k * hp.n_head[il]
        if hp.is_recurrent(il):
            w.norm("attn_norm_2", n=n)
            w("attn_qkv", hp.n_embd, 3 * n)
            w("attn_gate", hp.n_embd, n)
            w("attn_output", n, hp.n_embd)
        else:
            w.qkv(il)
            w.attn_out(il, bias=False)
        w.experts(il, n_ff=hp.n_ff[il], gate=None)


def attention(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    q, k, v = b.qkv(w, x, il)
    return b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)


def lightning(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    """Each head's part of the projection holds Q, K and V. Later layers fade more slowly."""
    hp, n, n_head = b.hp, b.hp.n_embd_head_k, b.hp.n_head[il]
    both = b.cb(ops.silu(b.linear(w.attn_qkv, x, "QKVcur", il)), "QKVcur_silu", il)
    parts = split(ops.reshape(both, (3 * n, n_head, b.n_tokens)), (n, n, n))
    q, k, v = (b.cb(y, name, il) for y, name in zip(parts, ("Qcur", "Kcur", "Vcur")))
    slope_scale = 1.0 - il / max(hp.n_layer - 1, 1) + 1e-5
    y = b.linear_attention(q, k, v, slope_scale, il)
    y = b.norm(ops.reshape(y, (n * n_head, b.n_tokens)), w.attn_norm_2, "qkv_norm", il)
    gate = b.cb(ops.sigmoid(b.linear(w.attn_gate, x, "g", il)), "g_sigm", il)
    return b.linear(w.attn_output, ops.mul(gate, y), "attn_out", il)


def graph(b: Builder) -> None:
    hp = b.hp
    x = b.inp_embd()
    for il, w in b.layers():
        x = b.norm(x, w.attn_norm, "attn_norm", il)
        y = lightning(b, w, x, il) if hp.is_recurrent(il) else attention(b, w, x, il)
        y, x = b.out_ids(il, y, x)
        y = b.add(y, b.scale(x, hp.f_residual_scale, "residual_scaled_attn", il), "ffn_inp", il)
        x = b.norm(y, w.ffn_norm, "ffn_norm", il)
        y = b.moe(w, x, il)
        x = b.layer_out(b.add(y, b.scale(x, hp.f_residual_scale, "residual_scaled_ffn", il), "ffn_out", il), il)
    b.finish(x)
