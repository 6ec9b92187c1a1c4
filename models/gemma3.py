"""gemma3: Gemma 3, text; norms around both blocks, Q and K normed per head, five of six layers with a window."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights

N_LAYER_27B = 62


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX)
    k = hp.keys
    head = hp.n_embd // hp.n_head[0] if hp.n_layer == N_LAYER_27B else hp.n_embd_head_k
    hp = hp.replace(f_attention_scale=head ** -0.5, rope_freq_scale_swa=1.0,
                    rope_freq_base_swa=float(k("rope.freq_base_swa", 10000.0)),
                    f_final_logit_softcapping=float(k("final_logit_softcapping", 0.0)))
    return hp.window(k("attention.sliding_window", 0), hp.swa_pattern(6))


def weights(t: Weights) -> None:
    t.embeddings()
    for il, w in t.layers():
        w.norm("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        w.norm("attn_q_norm", "attn_k_norm", n=t.hp.n_embd_head_k)
        w.qkv(il)
        w.attn_out(il)
        w.ffn(il)


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
