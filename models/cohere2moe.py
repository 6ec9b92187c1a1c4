"""cohere2moe: Cohere 2 with experts; leading dense layers, then one layer in four without window and rotation."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.build.moe import SIGMOID
from ggraph.hparams import HParams
from ggraph.ops import NORMAL
from ggraph.tensor import Tensor
from ggraph.weights import Group, Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, "logit_scale", rope_mode=NORMAL, rope_freq_base_swa=0.0, rope_freq_scale_swa=0.0)
    pattern = hp.swa_pattern(4, dense_first=True)
    rotated = tuple(swa or il < hp.n_layer_dense_lead for il, swa in enumerate(pattern))
    hp = hp.replace(rope_layers=rotated, expert_gating_func=hp.expert_gating_func or SIGMOID)
    return hp.window(hp.keys("attention.sliding_window"), pattern)


def weights(t: Weights) -> None:
    t.embeddings()
    for il, w in t.layers():
        layer_weights(t.hp, il, w)


def nextn_weights(t: Weights) -> None:
    layer_weights(t.hp, *t.nextn())


def layer_weights(hp: HParams, il: int, w: Group) -> None:
    w.norm("attn_norm")
    w.qkv(il)
    w.attn_out(il)
    if il < hp.n_layer_dense_lead:
        w.ffn(il)
        return
    w.experts(il)
    if hp.n_expert_shared:
        n_ff = hp.n_ff_exp[il] or hp.n_ff[il]
        w.ffn(il, n_ff=hp.n_ff_shexp or n_ff * hp.n_expert_shared, suffix="_shexp")


def experts(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    """The mean of chosen and shared experts."""
    hp = b.hp
    y = b.moe(w, x, il, gating=hp.expert_gating_func, norm_w=hp.expert_weights_norm, w_scale=hp.expert_weights_scale)
    if not hp.n_expert_shared:
        return y
    return b.scale(b.add(y, b.ffn(w, x, il, suffix="_shexp"), "ffn_sum", il), 0.5, "ffn_out", il)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        x = layer(b, w, x, il)
    b.finish(x)


def nextn_graph(b: Builder) -> None:
    b.nextn(layer)


def layer(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    y = b.norm(x, w.attn_norm, "attn_norm", il)
    q, k, v = b.qkv(w, y, il)
    attn = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
    attn, x, y = b.out_ids(il, attn, x, y)
    y = b.ffn(w, y, il) if il < b.hp.n_layer_dense_lead else experts(b, w, y, il)
    x = b.residual(x, y, "ffn_residual", il)
    return b.layer_out(b.residual(x, attn, "attn_residual", il), il)
