"""jais: Jais; ALiBi instead of rotation, layer norms, scores scaled by the head size itself."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, "attention.max_alibi_bias", f_norm_rms_eps=0.0)
    return hp.replace(f_attention_scale=1.0 / hp.n_embd_head_v)


def weights(t: Weights) -> None:
    t.embeddings(norm_bias=True)
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm", bias=True)
        w.qkv(il, bias=True)
        w.attn_out(il, bias=True)
        w.ffn(il, bias=True)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        y = b.attn(w.attn_output, q, k, v, il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        x = b.layer_out(b.residual(x, b.ffn(w, y, il), "ffn_out", il), il)
    b.finish(x)
