"""exaone4: EXAONE 4; norms after the blocks; in the 32B three of four layers have a window, and only they rotate."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights

N_LAYER_32B = 64


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX, rope_freq_base_swa=0.0, rope_freq_scale_swa=0.0)
    if hp.n_layer != N_LAYER_32B:
        return hp
    pattern = hp.swa_pattern(4)
    return hp.window(hp.keys("attention.sliding_window", 4096), pattern).replace(rope_layers=pattern)


def weights(t: Weights) -> None:
    t.embeddings()
    t.rope_factors()
    for il, w in t.layers():
        w.norm("post_attention_norm", "post_ffw_norm")
        w.norm("attn_q_norm", "attn_k_norm", n=t.hp.n_embd_head_k)
        w.qkv(il)
        w.attn_out(il)
        w.ffn(il)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        q, k, v = b.qkv(w, x, il)
        q, k = b.qk_norm(w, q, k, il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, b.norm(y, w.post_attention_norm, "attn_post_norm", il), "ffn_inp", il)
        y = b.norm(b.ffn(w, x, il), w.post_ffw_norm, "ffn_post_norm", il)
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
