"""qwen2moe: Qwen 1.5 and 2 with experts, one of them shared and weighted by a gate of its own."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph import ops
from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    return HParams.read(kv, rope_mode=NEOX)


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings()
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        w.qkv(il)
        w.attn_out(il)
        w.experts(il, n_ff=hp.n_ff_expert(il))
        w("ffn_gate_inp_shexp", hp.n_embd)
        w.ffn(il, n_ff=hp.n_ff_shexp or hp.n_ff[il], suffix="_shexp")


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        gate = b.cb(ops.sigmoid(b.linear(w.ffn_gate_inp_shexp, y, "ffn_shexp_gate_inp", il)), "ffn_shexp_gate", il)
        shared = b.cb(ops.mul(b.ffn(w, y, il, suffix="_shexp"), gate), "ffn_shexp_out", il)
        y = b.add(b.moe(w, y, il, norm_w=False), shared, "ffn_out", il)
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
