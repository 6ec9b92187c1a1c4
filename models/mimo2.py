"""mimo2: MiMo 2; windows with rotation of their own, attention sinks, layers with experts or dense as the file has them."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.build.moe import SIGMOID
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX, rope_freq_scale_swa=1.0)
    hp = hp.replace(rope_freq_base_swa=float(hp.keys("rope.freq_base_swa", 10000.0)))
    layers = hp.keys.per_layer("attention.sliding_window_pattern", hp.n_layer, convert=bool)
    return hp.window(hp.keys("attention.sliding_window"), layers)


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings()
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        w.qkv(il, bias=False)
        w.unused("attn_qkv.bias", "attn_q.bias", "attn_k.bias", "attn_v.bias")
        w.attn_out(il)
        w("attn_sinks", hp.n_head[il], optional=True)
        if w("ffn_gate", hp.n_embd, hp.n_ff[il], optional=True):
            w.ffn(il)
        if w("ffn_gate_inp", hp.n_embd, hp.n_expert, optional=True):
            w.experts(il)


def graph(b: Builder) -> None:
    value_scale = float(b.hp.keys("attention.value_scale", 1.0))
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il, sinks=w.attn_sinks)
        if value_scale not in (0.0, 1.0):
            y = b.scale(y, value_scale, "attn_out_scaled", il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        y = b.moe(w, y, il, gating=SIGMOID) if w.ffn_gate_inp else b.ffn(w, y, il)
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
