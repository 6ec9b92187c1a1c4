"""cohere2: Command R7B and Command A; parallel blocks, three of four layers with a window, and only they rotate."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NORMAL
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, "logit_scale", rope_mode=NORMAL, rope_freq_base_swa=0.0, rope_freq_scale_swa=0.0, f_norm_rms_eps=0.0)
    pattern = hp.swa_pattern(4)
    return hp.window(hp.keys("attention.sliding_window"), pattern).replace(rope_layers=pattern)


def weights(t: Weights) -> None:
    t.embeddings()
    for il, w in t.layers():
        w.norm("attn_norm")
        w.qkv(il)
        w.attn_out(il)
        w.ffn(il)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        attn = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        attn, x, y = b.out_ids(il, attn, x, y)
        x = b.residual(x, b.ffn(w, y, il), "ffn_out", il)
        x = b.layer_out(b.residual(x, attn, "attn_residual", il), il)
    b.finish(x)
