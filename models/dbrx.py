"""dbrx: DBRX; Q, K and V clamped, layer norms without bias, experts in every layer."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    return HParams.read(kv, "attention.clamp_kqv", rope_mode=NEOX, f_norm_rms_eps=0.0)


def weights(t: Weights) -> None:
    t.embeddings()
    for il, w in t.layers():
        w.norm("attn_norm", "attn_output_norm")
        w.qkv(il)
        w.attn_out(il)
        w.experts(il, n_ff=t.hp.n_ff[il])


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.attn_output_norm, "attn_out_norm", il)
        x = b.layer_out(b.residual(x, b.moe(w, y, il), "ffn_out", il), il)
    b.finish(x)
