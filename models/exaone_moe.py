"""exaone-moe: K-EXAONE; three of four layers with a window, only those rotate; experts after leading dense layers."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX, rope_freq_base_swa=0.0, rope_freq_scale_swa=0.0)
    pattern = hp.swa_pattern(4)
    return hp.window(hp.keys("attention.sliding_window"), pattern).replace(rope_layers=pattern)


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings()
    t.rope_factors()
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        w.norm("attn_q_norm", "attn_k_norm", n=hp.n_embd_head_k)
        w.qkv(il)
        w.attn_out(il)
        if il < hp.n_layer_dense_lead:
            w.ffn(il)
        else:
            w.experts(il)
            w.ffn(il, n_ff=hp.n_ff_shexp or hp.n_ff_exp[il], suffix="_shexp")


def graph(b: Builder) -> None:
    hp = b.hp
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        q, k = b.qk_norm(w, q, k, il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        y = b.ffn(w, y, il) if il < hp.n_layer_dense_lead else b.moe_and_shared(w, y, il)
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
