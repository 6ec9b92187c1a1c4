"""falcon: Falcon 1 and 2; attention and feed-forward side by side, in the 40B each with a norm of its own."""
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
        w.norm("attn_norm", bias=True)
        w.norm("attn_norm_2", bias=None, optional=True)
        w.qkv(il)
        w.attn_out(il)
        w.ffn(il, gate=False)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, b.norm(x, w.attn_norm_2, "attn_norm_2", il) if w.attn_norm_2 else y, il)
        attn = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        attn, x, y = b.out_ids(il, attn, x, y)
        y = b.add(b.ffn(w, y, il, act="gelu"), attn, "ffn_attn", il)
        x = b.layer_out(b.residual(x, y, "ffn_residual", il), il)
    b.finish(x)
