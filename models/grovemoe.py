"""grovemoe: GroveMoE; groups of experts share a small one, which runs on the result of those chosen."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph import ops
from ggraph.build import Builder
from ggraph.errors import ModelError
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.tensor import F32, I32, Tensor
from ggraph.weights import Group, Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX)
    if hp.keys.number("experts_per_group") < 1:
        raise ModelError("grovemoe.experts_per_group must be at least 1")
    return hp


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings()
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        w.norm("attn_q_norm", "attn_k_norm", n=hp.n_embd_head_k)
        w.qkv(il)
        w.attn_out(il)
        w.experts(il, n_ff=hp.n_ff_expert(il))
        n_ff = hp.keys.number("expert_chunk_feed_forward_length", 0) or hp.n_embd_head_k
        n_group = hp.n_expert // hp.keys.number("experts_per_group")
        for name in ("ffn_gate_chexps", "ffn_up_chexps"):
            w(name, hp.n_embd, n_ff, n_group)
        w("ffn_down_chexps", n_ff, hp.n_embd, n_group)


def experts(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    """The chosen experts, then on their sum the shared ones of their groups; choice by sigmoid, weights by softmax."""
    hp, per_group = b.hp, int(b.hp.keys("experts_per_group"))
    n_used = hp.n_expert_used[il]
    logits = b.linear(w.ffn_gate_inp, x, "ffn_moe_logits", il)
    probs = b.cb(ops.soft_max(logits), "ffn_moe_probs", il)
    selection = b.limit_groups(ops.sigmoid(logits), il)
    chosen = b.cb(ops.top_k(selection, n_used), "ffn_moe_topk", il)
    y = b.experts(w, x, chosen, b.expert_weights(probs, chosen, il), il)

    groups = ops.top_k(selection, min(n_used, hp.n_expert // per_group))
    if per_group > 1:                                # a group's weight is that of the expert of the same number
        groups = ops.cast(ops.scale(ops.cast(groups, F32), 1.0 / per_group), I32)
    shared = b.experts(w, y, groups, b.expert_weights(probs, groups, il), il, suffix="_chexps")
    shared = b.scale(b.cb(shared, "ffn_adj_moe_out", il), float(hp.keys("expert_group_scale")), "ffn_adj_scaled", il)
    return b.add(y, shared, "ffn_final_moe_out", il)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        q, k = b.qk_norm(w, q, k, il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        x = b.layer_out(b.residual(x, experts(b, w, y, il), "ffn_out", il), il)
    b.finish(x)
