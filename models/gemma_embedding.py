"""gemma-embedding: EmbeddingGemma; Gemma 3 whose tokens all see each other, with two matrices behind the pooling."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX, cache=False, head=False, causal=False)
    hp = hp.replace(f_attention_scale=hp.n_embd_head_k ** -0.5,
                    rope_freq_base_swa=float(hp.keys.number("rope.freq_base_swa", hp.rope_freq_base)))
    return hp.window(hp.keys.number("attention.sliding_window"), hp.swa_pattern(6), "symmetric")


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings()
    t("dense_2", hp.n_embd, int(hp.keys("dense_2_feat_out", 0)), optional=True)
    t("dense_3", int(hp.keys("dense_3_feat_in", 0)), hp.n_embd, optional=True)
    for il, w in t.layers():
        w.norm("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        w.norm("attn_q_norm", "attn_k_norm", n=hp.n_embd_head_k)
        w.qkv(il)
        w.attn_out(il, bias=False)
        w.ffn(il, bias=False)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    if not b.embd:                                   # vectors that are given come scaled
        x = b.scale(x, b.hp.n_embd ** 0.5, "inp_scaled")
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        q, k = b.qk_norm(w, q, k, il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, x = b.out_ids(il, y, x)
        y = b.norm(y, w.post_attention_norm, "attn_post_norm", il)
        x = b.residual(x, y, "sa_out", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        y = b.norm(b.ffn(w, y, il, act="gelu"), w.post_ffw_norm, "ffn_post_norm", il)
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
