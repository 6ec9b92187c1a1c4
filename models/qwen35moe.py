"""qwen35moe: Qwen 3.5 with experts in every layer, one of them shared and weighted by a gate of its own."""
from __future__ import annotations

from collections.abc import Callable

from ggraph import ops
from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.tensor import Tensor
from ggraph.weights import Group, Weights

from .qwen35 import delta_net, delta_net_weights, gated_attention, gated_attention_weights, hparams

__all__ = ["graph", "hparams", "nextn_graph", "nextn_weights", "weights"]


def weights(t: Weights) -> None:
    t.embeddings()
    for il, w in t.layers():
        w.norm("attn_norm", "post_attention_norm")
        if t.hp.is_recurrent(il):
            delta_net_weights(t.hp, w)
        else:
            gated_attention_weights(t.hp, w, il)
        expert_weights(t.hp, w, il)


def nextn_weights(t: Weights) -> None:
    il, w = t.nextn()
    w.norm("attn_norm", "post_attention_norm")
    gated_attention_weights(t.hp, w, il)
    expert_weights(t.hp, w, il)


def expert_weights(hp: HParams, w: Group, il: int) -> None:
    w.experts(il, n_ff=hp.n_ff_expert(il))
    w("ffn_gate_inp_shexp", hp.n_embd)
    w.ffn(il, n_ff=hp.n_ff_shexp or hp.n_ff[il], suffix="_shexp")


def experts(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    gate = b.linear(w.ffn_gate_inp_shexp, x, "shared_expert_gate", il)
    gate = b.cb(ops.sigmoid(gate), "shared_expert_gate_sigmoid", il)
    shared = b.cb(ops.mul(b.ffn(w, x, il, suffix="_shexp"), gate), "ffn_shexp_gated", il)
    return b.add(b.moe(w, x, il), shared, "ffn_out", il)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        x = layer(b, w, x, il)
    b.finish(x)


def nextn_graph(b: Builder) -> None:
    b.nextn(layer)


def layer(b: Builder, w: Group, x: Tensor, il: int, recurrent: Callable[..., Tensor] = delta_net) -> Tensor:
    y = b.norm(x, w.attn_norm, "attn_norm", il)
    y = recurrent(b, w, y, il) if b.hp.is_recurrent(il) else gated_attention(b, w, y, il)
    y, x = b.out_ids(il, y, x)
    x = b.residual(x, y, "attn_residual", il)
    y = b.norm(x, w.post_attention_norm, "attn_post_norm", il)
    return b.layer_out(b.residual(x, experts(b, w, y, il), "post_moe", il), il)
