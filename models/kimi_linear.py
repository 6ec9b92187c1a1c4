"""kimi-linear: Kimi Linear; KDA (delta nets with a decay of each channel), in one layer of four latent attention, experts.

The latent attention has no positions; leading layers are dense.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph import ops
from ggraph.build import Builder
from ggraph.build.core import split
from ggraph.hparams import HParams
from ggraph.tensor import Tensor
from ggraph.weights import Group, Weights

QKV = ("attn_q", "attn_k", "attn_v")


def hparams(kv: Mapping[str, Any]) -> HParams:
    return kda_hparams(HParams.read(kv).replace(n_lora_q=0))


def kda_hparams(hp: HParams) -> HParams:
    """KDA layers are those without KV heads; they have as many heads as the others, of a size of their own."""
    d, n_head = int(hp.keys.number("kda.head_dim")), max(hp.n_head)
    hp = hp.replace(ssm_d_state=d, ssm_d_inner=d * n_head, ssm_dt_rank=n_head, ssm_n_group=n_head)
    return hp.recurrent(hp.layers_without_kv())


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings(output=True)
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        if hp.is_recurrent(il):
            kda_weights(hp, w)
            low_rank(hp, w, "ssm_f")
            low_rank(hp, w, "ssm_g")
        else:
            w.mla(il)
        if il < hp.n_layer_dense_lead:
            w.ffn(il)
        else:
            w.experts(il, n_ff=hp.n_ff_exp[il], probs_bias=True)
            w.ffn(il, n_ff=hp.n_ff_exp[il] * (hp.n_expert_shared or 1), gate=None, suffix="_shexp")


def kda_weights(hp: HParams, w: Group, n_a: tuple[int, ...] = ()) -> None:
    """What all models with KDA share; `n_a`: the shape of ssm_a, if it is not [1, n_head]."""
    inner, n_head = hp.ssm_d_inner, hp.ssm_dt_rank
    mixed = w("attn_qkv", hp.n_embd, 3 * inner, optional=True)
    for name in QKV:
        w(name, hp.n_embd, inner, optional=mixed is not None)
        w(f"ssm_conv1d_{name[-1]}", hp.ssm_d_conv, 1, inner)
    w.unused("attn_qkv.bias", *(f"{name}.bias" for name in QKV))
    w("ssm_beta", hp.n_embd, n_head)
    w("ssm_dt", inner, suffix=".bias")
    w("ssm_a", *(n_a or (1, n_head)), suffix="")
    w("ssm_norm", hp.ssm_d_state)
    w("attn_output", inner, hp.n_embd)


def low_rank(hp: HParams, w: Group, name: str) -> None:
    """A matrix as the product of two."""
    w(name + "_a", hp.n_embd, hp.ssm_d_state)
    w(name + "_b", hp.ssm_d_state, hp.ssm_d_inner)


def kda(b: Builder, w: Group, x: Tensor, gate: Tensor, out_gate: Tensor, il: int) -> Tensor:
    """The delta rule with the logarithms of decays `gate` [d, n_head, n_tokens]; `out_gate` [d n_head, n_tokens] before its
    sigmoid."""
    d, n_head, inner = b.hp.ssm_d_state, b.hp.ssm_dt_rank, b.hp.ssm_d_inner
    rows = [b.mm(getattr(w, name), x) for name in QKV] if w.attn_qkv is None else split(b.mm(w.attn_qkv, x), (inner,) * 3)
    convs = (w.ssm_conv1d_q, w.ssm_conv1d_k, w.ssm_conv1d_v)
    done = [b.g.expand(ops.silu(b.conv(b.by_seq(y), p, il, part))) for part, (y, p) in enumerate(zip(rows, convs))]
    q, k, v = (b.by_seq(y, d, n_head) for y in done)
    q, k = b.l2_norm(q, "q_conv_predelta", il), b.l2_norm(k, "k_conv_predelta", il)
    beta = b.cb(ops.sigmoid(b.by_seq(b.linear(w.ssm_beta, x, "kda_beta", il), 1, n_head)), "kda_beta_sigmoid", il)
    y = b.delta_net(q, k, v, b.by_seq(b.cb(gate, "kda_g1", il), d, n_head), beta, il)
    y = b.norm(y, w.ssm_norm, "kda_normed", il)
    y = ops.mul(y, ops.sigmoid(b.by_seq(b.cb(out_gate, "kda_g2", il), d, n_head)))
    return b.linear(w.attn_output, b.all_tokens(y, inner), "kda_out", il)


def decay(b: Builder, w: Group, x: Tensor) -> Tensor:
    """x [d n_head, n_tokens] plus the step's bias, by heads [d, n_head, n_tokens]"""
    return ops.reshape(ops.add(x, w.ssm_dt.weight), (b.hp.ssm_d_state, b.hp.ssm_dt_rank, b.n_tokens))


def head_factors(b: Builder, w: Group) -> Tensor:
    return ops.reshape(w.ssm_a.weight, (1, b.hp.ssm_dt_rank))


def graph(b: Builder) -> None:
    hp = b.hp
    scale = hp.n_embd_head_k_mla ** -0.5
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        if hp.is_recurrent(il):
            gate = ops.mul(ops.softplus(decay(b, w, b.mm(w.ssm_f_b, b.mm(w.ssm_f_a, y)))), head_factors(b, w))
            y = kda(b, w, y, gate, b.mm(w.ssm_g_b, b.mm(w.ssm_g_a, y)), il)
        else:
            y = b.mla(w, y, il, scale)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        if il < hp.n_layer_dense_lead:
            y = b.ffn(w, y, il)
        else:
            moe = b.moe(w, y, il, gating=hp.expert_gating_func, w_scale=hp.expert_weights_scale)
            y = b.add(moe, b.ffn(w, y, il, suffix="_shexp"), "ffn_out", il)
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
