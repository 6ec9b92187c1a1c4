"""gemma2: Gemma 2; norms around both blocks, soft caps, every other layer with a window."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights

N_LAYER_27B = 46


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX)
    k = hp.keys
    head = hp.n_embd // hp.n_head[0] if hp.n_layer == N_LAYER_27B else hp.n_embd_head_k
    hp = hp.replace(f_embedding_scale=hp.n_embd ** 0.5, f_attention_scale=head ** -0.5,
                    rope_freq_base_swa=float(k("rope.freq_base_swa", hp.rope_freq_base)),
                    f_attn_logit_softcapping=float(k("attn_logit_softcapping", 50.0)),
                    f_final_logit_softcapping=float(k("final_logit_softcapping", 30.0)))
    return hp.window(k("attention.sliding_window", 4096), hp.swa_pattern(2))


def weights(t: Weights) -> None:
    t.embeddings()
    for il, w in t.layers():
        w.norm("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        w.qkv(il)
        w.attn_out(il)
        w.ffn(il)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, x = b.out_ids(il, y, x)
        y = b.norm(y, w.post_attention_norm, "attn_post_norm", il)
        x = b.residual(x, y, "sa_out", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        y = b.norm(b.ffn(w, y, il, act="gelu"), w.post_ffw_norm, "ffn_post_norm", il)
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
