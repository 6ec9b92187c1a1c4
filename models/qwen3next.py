"""qwen3next: Qwen 3 Next; gated delta nets and gated attention as Qwen 3.5 has them, with one position axis and experts."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph import ops
from ggraph.build import Builder
from ggraph.build.core import split
from ggraph.hparams import HParams
from ggraph.tensor import Tensor
from ggraph.weights import Group, Weights

from .qwen35 import conv_dim, delta_rule, gated_attention_weights
from .qwen35moe import expert_weights, layer, nextn_graph, nextn_weights

__all__ = ["graph", "hparams", "nextn_graph", "nextn_weights", "weights"]


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=ops.NEOX)
    return hp.recurrent(hp.recurrent_pattern(4))


def weights(t: Weights) -> None:
    t.embeddings()
    for il, w in t.layers():
        w.norm("attn_norm", "post_attention_norm")
        if t.hp.is_recurrent(il):
            delta_net_weights(t.hp, w)
        else:
            gated_attention_weights(t.hp, w, il)
        expert_weights(t.hp, w, il)


def delta_net_weights(hp: HParams, w: Group) -> None:
    """Old files hold Q, K, V and z in one matrix ssm_in."""
    mixed = w("attn_qkv", hp.n_embd, conv_dim(hp), optional=True)
    w("attn_gate", hp.n_embd, hp.ssm_d_inner, optional=mixed is None)
    w("ssm_in", hp.n_embd, conv_dim(hp) + hp.ssm_d_inner, optional=mixed is not None)
    w("ssm_conv1d", hp.ssm_d_conv, conv_dim(hp))
    w("ssm_dt", hp.ssm_dt_rank, suffix=".bias")
    w("ssm_a", hp.ssm_dt_rank, suffix="")
    w("ssm_ba", hp.n_embd, 2 * hp.ssm_dt_rank)
    w("ssm_norm", hp.ssm_d_state)
    w("ssm_out", hp.ssm_d_inner, hp.n_embd)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        x = layer(b, w, x, il, delta_net)
    b.finish(x)


def delta_net(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    """The projections lie group by group: a key head, and the value heads that it serves."""
    n_group = b.hp.ssm_n_group
    n = b.hp.ssm_dt_rank // n_group
    qkv, z = project(b, w, x, il) if w.attn_qkv is None else (b.linear(w.attn_qkv, x, "linear_attn_qkv_mixed", il),
                                                              b.linear(w.attn_gate, x, "z", il))
    both = b.linear(w.ssm_ba, x, "linear_attn_mixed_ba", il)
    beta, alpha = (ops.cont(y, (n * n_group, b.n_tokens)) for y in split(ops.reshape(both, (2 * n, n_group, b.n_tokens)), (n, n)))
    return delta_rule(b, w, qkv, z, b.cb(beta, "b", il), b.cb(alpha, "a", il), il, neighbours=True)


def project(b: Builder, w: Group, x: Tensor, il: int) -> tuple[Tensor, Tensor]:
    """Q, K and V [conv_dim, n_tokens] and z [d_inner, n_tokens] of the one matrix of old files."""
    hp, n_group = b.hp, b.hp.ssm_n_group
    key, value = hp.ssm_d_state, hp.ssm_d_inner // n_group
    both = b.linear(w.ssm_in, x, "linear_attn_mixed_qkvz", il)
    parts = split(ops.reshape(both, (2 * key + 2 * value, n_group, b.n_tokens)), (key, key, value, value))
    q, k, v, z = (ops.cont(y, (y.ne[0] * n_group, b.n_tokens)) for y in parts)
    return b.cb(ops.concat(ops.concat(q, k, 0), v, 0), "qkv_mixed", il), b.cb(z, "z", il)
