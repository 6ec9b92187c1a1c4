"""bailingmoe3: Ling 3; delta nets with bounded decays of each channel, latent attention with a gate on each head, experts."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph import ops
from ggraph.build import Builder
from ggraph.build.ffn import Activation
from ggraph.errors import ModelError
from ggraph.hparams import HParams
from ggraph.tensor import Tensor
from ggraph.weights import Group, Weights

from .kimi_linear import decay, head_factors, kda, kda_hparams, kda_weights

INF = float("inf")


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv)
    if not hp.keys("kda.safe_gate", True) or not hp.keys.number("kda.gate_lower_bound") < 0:
        raise ModelError(f"{hp.arch}: decays without a lower bound (kda.safe_gate, kda.gate_lower_bound) are not supported")
    with_axes = hp.rope_sections[0] > 0 and hp.rope_sections[1] > 0               # the text of a model that also sees
    return kda_hparams(hp.replace(rope_mode=ops.MROPE if with_axes else ops.NORMAL,
                                  n_ff_shexp=hp.n_ff_shexp or hp.n_ff_exp[0] * (hp.n_expert_shared or 1)))


def weights(t: Weights) -> None:
    t.embeddings()
    for il, w in t.layers():
        layer_weights(t.hp, il, w)


def nextn_weights(t: Weights) -> None:
    il, w = t.nextn()
    layer_weights(t.hp, il, w)
    w.norm("layer_output_norm")
    w.alias("nextn_shared_head_norm", w.layer_output_norm)


def layer_weights(hp: HParams, il: int, w: Group) -> None:
    w.norm("attn_norm", "ffn_norm")
    if hp.is_recurrent(il):
        kda_weights(hp, w)
        w("ssm_f_a", hp.n_embd, hp.ssm_d_inner)
        w("ssm_g_a", hp.n_embd, hp.ssm_d_inner)
    else:
        w.mla(il)
        w("attn_gate", hp.n_embd, hp.n_head[il])
    if il < hp.n_layer_dense_lead:
        w.ffn(il)
    else:
        w.experts(il, n_ff=hp.n_ff_exp[il], probs_bias=True)
        w.ffn(il, n_ff=hp.n_ff_shexp, suffix="_shexp")


def limited(limit: float) -> Activation:
    """silu(gate) * up, both factors kept below `limit` and the second above its negative; 0: without limits."""
    def act(gate: Tensor, up: Tensor) -> Tensor:
        return ops.mul(ops.clamp(ops.silu(gate), -INF, limit), ops.clamp(up, -limit, limit))
    return act if limit > 1e-6 else "silu"


def activation(hp: HParams, il: int, name: str) -> Activation:
    """The activation of layer il, with the limits of the key `name`."""
    return limited(hp.keys.per_layer(name, hp.n_layer, 0.0, convert=float)[il])


def attention(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    y = b.mla(w, x, il, b.hp.n_embd_head_k_mla ** -0.5, project=False)
    y = b.gate_attn(y, ops.sigmoid(b.linear(w.attn_gate, x, "attn_gate", il)), il)
    return b.linear(w.attn_output, y, "mla_out", il)


def delta_net(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    gate = ops.sigmoid(ops.mul(decay(b, w, b.mm(w.ssm_f_a, x)), head_factors(b, w)))
    gate = ops.scale(gate, float(b.hp.keys.number("kda.gate_lower_bound")))
    return kda(b, w, x, gate, b.mm(w.ssm_g_a, x), il)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        x = layer(b, w, x, il)
    b.finish(x)


def nextn_graph(b: Builder) -> None:
    b.nextn(layer)


def layer(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    hp = b.hp
    act, act_exp = activation(hp, il, "swiglu_clamp_shexp"), activation(hp, il, "swiglu_clamp_exp")
    y = b.norm(x, w.attn_norm, "attn_norm", il)
    y = delta_net(b, w, y, il) if hp.is_recurrent(il) else attention(b, w, y, il)
    y, x = b.out_ids(il, y, x)
    x = b.residual(x, y, "ffn_inp", il)
    y = b.norm(x, w.ffn_norm, "ffn_norm", il)
    if il < hp.n_layer_dense_lead:
        y = b.ffn(w, y, il, act)
    else:
        moe = b.moe(w, y, il, act=act_exp, gating=hp.expert_gating_func, norm_w=hp.expert_weights_norm,
                    w_scale=hp.expert_weights_scale)
        y = b.add(moe, b.ffn(w, y, il, act, suffix="_shexp"), "ffn_out", il)
    return b.layer_out(b.residual(x, y, "ffn_out", il), il)
