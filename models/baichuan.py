"""baichuan: Baichuan 1 and 2; the 7B rotates, the 13B has ALiBi; sizes are told apart by the number of layers."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NORMAL
from ggraph.weights import Weights

N_LAYER_7B, N_LAYER_13B = 32, 40


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv)
    if hp.n_layer == N_LAYER_7B:
        return hp.replace(rope_mode=NORMAL)
    return hp.replace(f_max_alibi_bias=8.0 if hp.n_layer == N_LAYER_13B else 0.0)


def weights(t: Weights) -> None:
    t.embeddings()
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        w.qkv(il)
        w.attn_out(il)
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
        x = b.layer_out(b.residual(x, b.ffn(w, y, il), "ffn_out", il), il)
    b.finish(x)
