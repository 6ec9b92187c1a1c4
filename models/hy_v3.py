"""hy_v3: Hy 3; Q and K normed per head, experts chosen by sigmoid with a bias in layers with a router, one shared."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.build.moe import SIGMOID
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.tensor import Tensor
from ggraph.weights import Group, Weights

EXPERTS = tuple(f"{name}_{kind}" for kind in ("exps", "shexp") for name in ("gate_up", "gate", "up", "down"))


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX)
    return hp.replace(expert_gating_func=hp.expert_gating_func or SIGMOID)


def weights(t: Weights) -> None:
    t.embeddings()
    for il, w in t.layers():
        layer_weights(t.hp, il, w)


def nextn_weights(t: Weights) -> None:
    layer_weights(t.hp, *t.nextn())


def layer_weights(hp: HParams, il: int, w: Group) -> None:
    w.norm("attn_norm", "ffn_norm")
    w.norm("attn_q_norm", "attn_k_norm", n=hp.n_embd_head_k)
    w.qkv(il)
    w.attn_out(il)
    if w("ffn_gate_inp", hp.n_embd, hp.n_expert, optional=True) is None:
        w.ffn(il)
        w.unused("exp_probs_b", *(f"ffn_{name}.weight" for name in EXPERTS))
        return
    w.unused(*(f"ffn_{name}.weight" for name in ("gate", "up", "down")))
    w.experts(il, n_ff=hp.n_ff_expert(il), probs_suffix="")
    w.ffn(il, n_ff=hp.n_ff_shexp or hp.n_ff_expert(il), gate=None, suffix="_shexp")


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        x = layer(b, w, x, il)
    b.finish(x)


def nextn_graph(b: Builder) -> None:
    b.nextn(layer)


def layer(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    y = b.norm(x, w.attn_norm, "attn_norm", il)
    q, k, v = b.qkv(w, y, il)
    q, k = b.qk_norm(w, q, k, il)
    y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
    y, x = b.out_ids(il, y, x)
    x = b.residual(x, y, "ffn_inp", il)
    y = b.norm(x, w.ffn_norm, "ffn_norm", il)
    y = b.ffn(w, y, il) if w.ffn_gate_inp is None else b.moe_and_shared(w, y, il)
    return b.layer_out(b.residual(x, y, "ffn_out", il), il)
