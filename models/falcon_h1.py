"""falcon-h1: Falcon H1; in every layer attention and Mamba 2 side by side on the same input."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX)
    return hp.recurrent((True,) * hp.n_layer, kv_beside_state=True)


def weights(t: Weights) -> None:
    t.embeddings()
    t.unused("rope_freqs.weight")
    for il, w in t.layers():
        w.norm("attn_norm")
        w("ffn_norm", t.hp.n_embd, suffix="")
        w.mamba2(norm=False)
        w.qkv(il)
        w.attn_out(il, bias=False)
        w.unused("attn_output.bias")
        w.ffn(il, bias=None)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        attn = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y = b.add(attn, b.cb(b.mamba2(w, y, il), "ssm_out", il), "layer_out", il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        x = b.layer_out(b.residual(x, b.ffn(w, y, il), "ffn_out", il), il)
    b.finish(x)
