"""refact: Refact 1.6B; llama with ALiBi instead of rotation.

With experts in the file llama.cpp runs the activation alone, without any of them; so do we.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    return HParams.read(kv, f_max_alibi_bias=8.0)


def weights(t: Weights) -> None:
    t.embeddings()
    t.unused("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        w.qkv(il)
        w.attn_out(il, bias=False)
        w.unused("attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")
        if t.hp.n_expert:
            w.unused(*(f"ffn_{name}.weight" for name in ("gate_inp", "gate_exps", "up_exps", "down_exps")))
        else:
            w.ffn(il, bias=False)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        y = b.attn(w.attn_output, q, k, v, il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        y = b.activate(y, "silu") if b.hp.n_expert else b.ffn(w, y, il)
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
