"""deci: Nemotron, pruned from Llama 3; heads and lengths per layer, layers without attention or feed-forward."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NORMAL
from ggraph.tensor import Tensor
from ggraph.weights import Group, Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    return HParams.read(kv, rope_mode=NORMAL)


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings()
    t.rope_factors()
    for il, w in t.layers():
        if hp.n_head[il]:
            w.norm("attn_norm")
        if hp.n_head_kv[il]:
            w.qkv(il)
            w.attn_out(il)
        else:
            w("attn_output", hp.n_embd, hp.n_embd, optional=not hp.n_head[il])
            w.unused("attn_output.bias")
        if hp.n_ff[il]:
            w.norm("ffn_norm")
            w.ffn(il)
        else:
            w.unused("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")


def attention(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    """Attention, or in layers without KV heads the output matrix alone."""
    y = b.norm(x, w.attn_norm, "attn_norm", il)
    if not b.hp.n_head_kv[il]:
        return b.linear(w.attn_output, y, "wo", il)
    q, k, v = b.qkv(w, y, il)
    return b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)


def graph(b: Builder) -> None:
    hp = b.hp
    x = b.inp_embd()
    for il, w in b.layers():
        if not hp.n_ff[il]:                              # such a layer adds nothing at all
            x, = b.out_ids(il, x)
            continue
        y = attention(b, w, x, il) if hp.n_head[il] else None
        if y is None:
            x, = b.out_ids(il, x)
        else:
            y, x = b.out_ids(il, y, x)
            x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        x = b.layer_out(b.residual(x, b.ffn(w, y, il), "ffn_out", il), il)
    b.finish(x)
