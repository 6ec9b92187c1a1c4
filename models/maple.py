"""maple: Maple; experts in every layer with bounded activations, rotation in the window layers alone."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX)
    layers = hp.keys.per_layer("attention.sliding_window_pattern", hp.n_layer, convert=bool)
    hp = hp.replace(rope_layers=layers, n_rot_swa=int(hp.keys("rope.dimension_count_swa", 0)),
                    rope_freq_base_swa=float(hp.keys("rope.freq_base_swa", hp.rope_freq_base)))
    return hp.window(hp.keys("attention.sliding_window"), layers)


def weights(t: Weights) -> None:
    t.embeddings()
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        w.norm("attn_q_norm", "attn_k_norm", n=t.hp.n_embd_head_k)
        w.qkv(il)
        w.attn_out(il)
        w.experts(il)


def graph(b: Builder) -> None:
    limits = b.hp.keys.per_layer("swiglu_clamp_exp", b.hp.n_layer, convert=float)
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        q, k = b.qk_norm(w, q, k, il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        y = b.moe(w, y, il, limit=limits[il])
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
