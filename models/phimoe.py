"""phimoe: Phi 3.5 MoE; experts in every layer, norms with biases, LongRoPE."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    return HParams.read(kv, rope_mode=NEOX)


def weights(t: Weights) -> None:
    t.embeddings(norm_bias=True, output_bias=True)
    for name in ("rope_factors_long", "rope_factors_short"):
        t(name, t.hp.n_embd // t.hp.n_head[0] // 2, optional=True)
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm", bias=True)
        w.qkv(il)
        w.attn_out(il, bias=True)
        w.experts(il, n_ff=t.hp.n_ff[il])


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        q = b.scale(b.rope(q, il), b.hp.kq_scale, "Qcur", il)        # before it meets K, where it is rounded
        y = b.attn(w.attn_output, q, b.rope(k, il), v, il, scale=1.0)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        y = b.moe(w, y, il)
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
