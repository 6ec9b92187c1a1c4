"""minicpm: MiniCPM 1 and 2; llama with scaled embeddings, residuals and logits, dense or with experts."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NORMAL
from ggraph.weights import Weights

from .granite import inverse


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NORMAL)
    k = hp.keys
    return hp.replace(f_embedding_scale=float(k("embedding_scale", 12.0)),
                      f_residual_scale=float(k("residual_scale", 1.4 / hp.n_layer ** 0.5)),
                      f_logit_scale=inverse(float(k("logit_scale", 256.0 / hp.n_embd))))


def weights(t: Weights) -> None:
    t.embeddings()
    t.rope_factors()
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        w.qkv(il)
        w.attn_out(il)
        if t.hp.n_expert:
            w.experts(il, n_ff=t.hp.n_ff[il], gate=None)
        else:
            w.ffn(il)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        y = b.moe(w, y, il) if b.hp.n_expert else b.ffn(w, y, il)
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
