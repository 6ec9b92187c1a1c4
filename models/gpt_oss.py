"""gpt-oss: OpenAI's open models; attention sinks, every other layer with a window, experts with biases."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.build.moe import SOFTMAX_WEIGHT
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX)
    hp = hp.replace(rope_freq_base_swa=float(hp.keys("rope.freq_base_swa", hp.rope_freq_base)))
    return hp.window(hp.keys("attention.sliding_window"), hp.swa_pattern(2))


def weights(t: Weights) -> None:
    t.embeddings(output=True)
    for il, w in t.layers():
        w.norm("attn_norm", "post_attention_norm")
        w.qkv(il)
        w.attn_out(il, bias=True)
        w("attn_sinks", t.hp.n_head[il])
        w.experts(il, bias=True)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il, sinks=w.attn_sinks)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.post_attention_norm, "attn_post_norm", il)
        y = b.moe(w, y, il, act="swiglu_oai", gating=SOFTMAX_WEIGHT, norm_w=False)
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
