"""smallthinker: SmallThinker; experts with ReLU chosen before the attention, every fourth layer without window and rotation."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights

WINDOW, NO_ROPE_STEP = 4096, 4


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX)
    hp = hp.replace(rope_freq_base_swa=float(hp.keys("rope.freq_base_swa", hp.rope_freq_base)))
    if not hp.keys("attention.sliding_window", 0):
        return hp
    if hp.n_layer != NO_ROPE_STEP:                   # as in llama.cpp: four layers all rotate
        hp = hp.replace(rope_layers=tuple(il % NO_ROPE_STEP != 0 for il in range(hp.n_layer)))
    return hp.window(WINDOW, hp.swa_pattern(4, dense_first=True))


def weights(t: Weights) -> None:
    t.embeddings()
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        w.qkv(il)
        w.attn_out(il)
        w.experts(il)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        logits = b.linear(w.ffn_gate_inp, x, "ffn_moe_logits", il)
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, logits, x = b.out_ids(il, y, logits, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        y = b.moe(w, y, il, act="relu", gating=b.hp.expert_gating_func, logits=logits)
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
