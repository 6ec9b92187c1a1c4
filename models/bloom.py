"""bloom: BLOOM; ALiBi, a norm on the embeddings, layer norms, biases everywhere."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    return HParams.read(kv, f_max_alibi_bias=8.0, f_norm_rms_eps=0.0)


def weights(t: Weights) -> None:
    t.embeddings(norm_bias=True)
    t.norm("token_embd_norm", bias=True)
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm", bias=True)
        w.qkv(il, bias=True)
        w.attn_out(il, bias=True)
        w.ffn(il, bias=True, gate=False)


def graph(b: Builder) -> None:
    x = b.norm(b.inp_embd(), b.w.token_embd_norm, "inp_norm", 0)
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        y = b.attn(w.attn_output, q, k, v, il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        x = b.layer_out(b.residual(x, b.ffn(w, y, il, act="gelu"), "ffn_out", il), il)
    b.finish(x)
