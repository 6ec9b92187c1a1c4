"""afmoe: Arcee Trinity; a gate on the attention's result, norms around both blocks, windows in three of four layers."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph import ops
from ggraph.build import Builder
from ggraph.build.moe import SIGMOID
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights

NO_ROPE_STEP = 4


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX)
    rotated = tuple((il + 1) % NO_ROPE_STEP != 0 for il in range(hp.n_layer))
    hp = hp.replace(f_embedding_scale=hp.n_embd ** 0.5, rope_layers=rotated,
                    expert_gating_func=hp.expert_gating_func or SIGMOID,
                    rope_freq_base_swa=float(hp.keys("rope.freq_base_swa", hp.rope_freq_base)))
    return hp.window(hp.keys("attention.sliding_window", 0), hp.swa_pattern(4))


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings()
    for il, w in t.layers():
        w.norm("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        w.norm("attn_q_norm", "attn_k_norm", n=hp.n_embd_head_k)
        w.qkv(il)
        w("attn_gate", hp.n_embd, hp.n_embd_head_k * hp.n_head[il])
        w.attn_out(il)
        if il < hp.n_layer_dense_lead:
            w.ffn(il)
        else:
            w.experts(il, probs_bias=True)
            if hp.n_expert_shared:
                w.ffn(il, n_ff=hp.n_ff_exp[il] * hp.n_expert_shared, suffix="_shexp")


def graph(b: Builder) -> None:
    hp = b.hp
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        gate = b.linear(w.attn_gate, y, "attn_gate_proj", il)
        q, k = b.qk_norm(w, q, k, il)
        y = b.attn(None, b.rope(q, il), b.rope(k, il), v, il)
        y = b.linear(w.attn_output, b.gate_attn(y, ops.sigmoid(gate), il), "attn_o_proj", il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, b.norm(y, w.post_attention_norm, "attn_post_norm", il), "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        y = b.ffn(w, y, il) if il < hp.n_layer_dense_lead else b.moe_and_shared(w, y, il)
        x = b.layer_out(b.residual(x, b.norm(y, w.post_ffw_norm, "ffn_post_norm", il), "ffn_out", il), il)
    b.finish(x)
