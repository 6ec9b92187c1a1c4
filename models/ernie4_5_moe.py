"""ernie4_5-moe: ERNIE 4.5 with experts in each n-th layer after leading dense ones, and a shared expert."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.errors import ModelError
from ggraph.hparams import HParams
from ggraph.ops import NORMAL
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NORMAL)
    if hp.keys.number("interleave_moe_layer_step") < 1:
        raise ModelError("ernie4_5-moe.interleave_moe_layer_step must be at least 1")
    return hp


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings()
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        w.qkv(il)
        w.attn_out(il, bias=False)
        w.unused("attn_output.bias")
        if il < hp.n_layer_dense_lead:
            w.ffn(il)
            continue
        w.experts(il, gate=None)
        if hp.n_ff_shexp:
            w.ffn(il, n_ff=hp.n_ff_shexp, suffix="_shexp")


def graph(b: Builder) -> None:
    hp, step = b.hp, int(b.hp.keys("interleave_moe_layer_step"))
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        if il < hp.n_layer_dense_lead:
            y = b.ffn(w, y, il)
        elif (il + 1) % step:
            y = b.activate(y, "silu")                # between the steps llama.cpp runs no matrix
        else:
            moe = b.moe(w, y, il)
            y = b.add(moe, b.ffn(w, y, il, suffix="_shexp"), "ffn_out", il) if hp.n_ff_shexp else moe
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
