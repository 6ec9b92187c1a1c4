"""glm4moe: GLM 4.5 to 4.7; experts chosen by sigmoid with a bias after leading dense layers, shared experts."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.build.moe import SIGMOID
from ggraph.hparams import HParams
from ggraph.ops import MROPE, NEOX
from ggraph.tensor import Tensor
from ggraph.weights import Group, Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv)
    return hp.replace(rope_mode=MROPE if min(hp.rope_sections[:2]) > 0 else NEOX,
                      expert_gating_func=hp.expert_gating_func or SIGMOID)


def weights(t: Weights) -> None:
    t.embeddings()
    for il, w in t.layers():
        layer_weights(t.hp, il, w)


def nextn_weights(t: Weights) -> None:
    layer_weights(t.hp, *t.nextn())


def layer_weights(hp: HParams, il: int, w: Group) -> None:
    w.norm("attn_norm", "post_attention_norm")
    w.norm("attn_q_norm", "attn_k_norm", n=hp.n_embd_head_k, optional=True)
    w.qkv(il)
    w.attn_out(il)
    if il < hp.n_layer_dense_lead:
        w.ffn(il)
        return
    w.experts(il, n_ff=hp.n_ff_expert(il), probs_bias=True)
    if hp.n_expert_shared:
        w.ffn(il, n_ff=hp.n_ff_expert(il) * hp.n_expert_shared, suffix="_shexp")


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        x = layer(b, w, x, il)
    b.finish(x)


def nextn_graph(b: Builder) -> None:
    b.nextn(layer)


def layer(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    hp = b.hp
    y = b.norm(x, w.attn_norm, "attn_norm", il)
    q, k, v = b.qkv(w, y, il)
    q, k = b.qk_norm(w, q, k, il)
    y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
    y, x = b.out_ids(il, y, x)
    x = b.residual(x, y, "ffn_inp", il)
    y = b.norm(x, w.post_attention_norm, "post_attn_norm", il)
    y = b.ffn(w, y, il) if il < hp.n_layer_dense_lead else b.moe_and_shared(w, y, il)
    return b.layer_out(b.residual(x, y, "ffn_out", il), il)
