"""modern-bert: ModernBERT; norms before both blocks, two of three layers look through a window that reaches both ways."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights

MEAN = 1                # of llama.cpp's pooling types
SILU = ("silu", "swish", "swiglu")


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX, cache=False, head=False, rank_act="gelu", f_norm_rms_eps=0.0)
    hp = hp.replace(rank_pooling="mean" if hp.keys.number("classifier.pooling_type", MEAN) == MEAN else "cls",
                    rope_freq_base_swa=float(hp.keys.number("rope.freq_base_swa", hp.rope_freq_base)))
    return hp.window(hp.keys.number("attention.sliding_window", 0), hp.swa_pattern(3, dense_first=True), "symmetric")


def weights(t: Weights) -> None:
    t.encoder()
    t.norm("output_norm")
    for il, w in t.layers():
        w.norm("attn_norm", optional=il == 0)
        w.qkv(il, bias=False)
        w.attn_out(il, bias=False)
        w.norm("ffn_norm")
        w("ffn_up", t.hp.n_embd, 2 * t.hp.n_ff[il])
        w("ffn_down", t.hp.n_ff[il], t.hp.n_embd)


def graph(b: Builder) -> None:
    act = "silu" if b.hp.keys("hidden_activation", "gelu") in SILU else "gelu"
    x = b.norm(b.inp_embd(), b.w.token_embd_norm, "inp_norm")
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il) if w.attn_norm else x
        q, k, v = b.qkv(w, y, il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.ffn(w, b.norm(x, w.ffn_norm, "ffn_norm", il), il, act=act)
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
