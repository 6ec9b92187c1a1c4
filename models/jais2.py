"""jais2: Jais 2; layer norms and biases everywhere, a feed-forward of squared ReLU without a gate."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    return HParams.read(kv, rope_mode=NEOX, f_norm_rms_eps=0.0)


def weights(t: Weights) -> None:
    t.embeddings(norm_bias=True)
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm", bias=True)
        w.qkv(il)
        w.attn_out(il, bias=True)
        w.ffn(il, bias=True, gate=False)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        x = b.layer_out(b.residual(x, b.ffn(w, y, il, act="relu_sqr"), "ffn_out", il), il)
    b.finish(x)
