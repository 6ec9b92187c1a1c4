"""muse-glimmer: Muse Glimmer; norms around both blocks, a gate on the attention's output, rotation in the window layers alone."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph import ops
from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NORMAL
from ggraph.weights import Weights

POST_NORM_EPS = 1e-8


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, "logit_scale", rope_mode=NORMAL, rope_freq_scale_swa=1.0)
    k, layers = hp.keys, hp.swa_pattern(4)
    hp = hp.replace(rope_layers=layers, rope_freq_base_swa=float(k("rope.freq_base_swa", hp.rope_freq_base)),
                    f_final_logit_softcapping=float(k("final_logit_softcapping", 30.0)))
    return hp.window(k("attention.sliding_window"), layers)


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings()
    for il, w in t.layers():
        w.norm("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        w.norm("attn_q_norm", "attn_k_norm", n=hp.n_embd_head_k)
        w.qkv(il)
        w("attn_gate", hp.n_embd, hp.n_embd_head_k * hp.n_head[il])
        w.attn_out(il)
        w.ffn(il)


def graph(b: Builder) -> None:
    x = b.norm(b.inp_embd(), None, "embd_norm")
    for il, w in b.layers():
        n = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, n, il)
        q, k = b.qk_norm(w, q, k, il)
        y = b.attn(None, b.rope(q, il), b.rope(k, il), v, il)
        gate = b.cb(ops.sigmoid(b.linear(w.attn_gate, n, "attn_gate_proj", il)), "attn_gate_sig", il)
        y = b.linear(w.attn_output, b.gate_attn(y, gate, il), "attn_o_proj", il)
        y, x = b.out_ids(il, y, x)
        y = b.rms_norm(y, w.post_attention_norm, "attn_post_norm", il, eps=POST_NORM_EPS)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        y = b.rms_norm(b.ffn(w, y, il), w.post_ffw_norm, "ffn_post_norm", il, eps=POST_NORM_EPS)
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
