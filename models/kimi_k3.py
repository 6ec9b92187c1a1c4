"""kimi-k3: Kimi K3; KDA and gated latent attention, experts in a latent space, residuals that attend to earlier ones."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph import ops
from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.tensor import Tensor
from ggraph.weights import Group, Param, Weights

from .kimi_linear import decay, head_factors, kda, kda_hparams, kda_weights, low_rank


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv)
    return kda_hparams(hp.replace(n_embd_head_v=hp.n_lora_kv))                     # which old files do not say


def block_size(hp: HParams) -> int:
    """A residual is kept every so many layers; 0: never."""
    return int(hp.keys.number("attn_res.block_size"))


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings(output=True)
    if block_size(hp):
        t("output_res_score", hp.n_embd)
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        if block_size(hp):
            w.norm("attn_res_score", "ffn_res_score")
        if hp.is_recurrent(il):
            kda_weights(hp, w, n_a=(hp.ssm_dt_rank,))
            low_rank(hp, w, "ssm_f")
            w("ssm_g", hp.n_embd, hp.ssm_d_inner)
        else:
            w.mla(il)
            w("attn_gate", hp.n_embd, hp.n_head[il] * hp.n_embd_head_v_mla, optional=True)
        if il < hp.n_layer_dense_lead:
            w.ffn(il)
        else:
            expert_weights(hp, w, il)


def expert_weights(hp: HParams, w: Group, il: int) -> None:
    n = int(hp.keys("expert_latent_length", 0))
    w.experts(il, n_ff=hp.n_ff_exp[il], probs_bias=True, n_embd=n)
    if n:
        w("ffn_routed_down", hp.n_embd, n)
        w("ffn_routed_up", n, hp.n_embd)
        w.norm("ffn_routed_norm", n=n, optional=True)
    shared = tuple(f"ffn_{name}_shexp" for name in ("gate", "up", "down"))
    if w.shape(shared[0] + ".weight"):
        w.ffn(il, n_ff=hp.n_ff_exp[il] * (hp.n_expert_shared or 1), suffix="_shexp")
    else:
        w.unused(*(f"{name}.weight" for name in shared))


class Situ:
    """beta tanh(gate / beta) sigmoid(gate) * up, and up bounded in the same way where the file gives a bound."""

    def __init__(self, hp: HParams):
        self.beta = float(hp.keys.number("activation.situ_beta"))
        self.beta_up = float(hp.keys.number("activation.situ_linear_beta"))

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        gated = ops.mul(bounded(gate, self.beta), ops.sigmoid(gate))
        return ops.mul(gated, bounded(up, self.beta_up) if self.beta_up > 0 else up)


def bounded(x: Tensor, limit: float) -> Tensor:
    return ops.scale(ops.tanh(ops.scale(x, 1.0 / limit)), limit)


class Residuals:
    """The residuals that are kept, each [n_embd, n_tokens], and the mix of them that a block reads."""

    def __init__(self, b: Builder):
        self.b = b
        self.kept: list[tuple[Tensor, Tensor]] = []                               # raw, and normed for the scores

    def keep(self, x: Tensor) -> None:
        self.kept.append((x, self._normed(x)))

    def _normed(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.b.hp.f_norm_rms_eps)

    def mix(self, x: Tensor, p: Param, il: int = -1) -> Tensor:
        """The sum of what is kept and of x, weighted by softmax over the products of the normed ones with p."""
        if not self.kept:
            return x
        all = [*self.kept, (x, self._normed(x))]
        scores = ops.sum_rows(ops.mul(all[0][1], p.weight))
        for _, normed in all[1:]:
            scores = ops.concat(scores, ops.sum_rows(ops.mul(normed, p.weight)), 0)
        probs = self.b.cb(ops.soft_max(scores), "res_probs", il)                  # [n, n_tokens]
        weighted = [ops.mul(raw, ops.view(probs, (1, x.ne[1]), (probs.nb[1],), i * probs.nb[0])) for i, (raw, _) in enumerate(all)]
        y = weighted[0]
        for term in weighted[1:]:
            y = ops.add(y, term)
        return y


def attention(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    y = b.mla(w, x, il, b.hp.n_embd_head_k_mla ** -0.5, project=False)
    if w.attn_gate is not None:
        y = b.cb(ops.mul(y, ops.sigmoid(b.mm(w.attn_gate, x))), "mla_gated", il)
    return b.linear(w.attn_output, y, "mla_out", il)


def delta_net(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    """A lower bound of the decays comes with another function of the gate."""
    gate, a = decay(b, w, b.mm(w.ssm_f_b, b.mm(w.ssm_f_a, x))), head_factors(b, w)
    bound = b.hp.keys("kda.gate_lower_bound", None)
    if bound is None:
        gate = ops.mul(ops.softplus(gate), a)
    else:
        gate = ops.scale(ops.sigmoid(ops.neg(ops.mul(gate, a))), float(bound))
    return kda(b, w, x, gate, b.mm(w.ssm_g, x), il)


def experts(b: Builder, w: Group, x: Tensor, il: int, act: Situ) -> Tensor:
    """The router and the shared expert see the whole input."""
    hp = b.hp
    logits = b.linear(w.ffn_gate_inp, x, "ffn_moe_logits", il)
    latent = "ffn_routed_down" in vars(w)
    y = b.mm(w.ffn_routed_down, x) if latent else x
    y = b.moe(w, y, il, act=act, gating=hp.expert_gating_func, norm_w=hp.expert_weights_norm, w_scale=hp.expert_weights_scale,
              logits=logits)
    if latent:
        y = b.mm(w.ffn_routed_up, b.norm(y, w.ffn_routed_norm, "ffn_routed_norm", il) if w.ffn_routed_norm else y)
    return b.add(y, b.ffn(w, x, il, act, suffix="_shexp"), "ffn_out", il) if "ffn_up_shexp" in vars(w) else y


def graph(b: Builder) -> None:
    hp, act, residuals = b.hp, Situ(b.hp), Residuals(b)
    every = block_size(hp)
    x = b.inp_embd()
    for il, w in b.layers():
        y = residuals.mix(x, w.attn_res_score, il) if every else x
        keep = every > 0 and il % every == 0
        if keep:
            residuals.keep(x)
        y = b.norm(y, w.attn_norm, "attn_norm", il)
        y = delta_net(b, w, y, il) if hp.is_recurrent(il) else attention(b, w, y, il)
        x = b.cb(y if keep else ops.add(x, y), "prefix_sum_attn", il)             # a kept residual starts anew
        y = residuals.mix(x, w.ffn_res_score, il) if every else x
        y = b.norm(y, w.ffn_norm, "ffn_norm", il)
        y = b.ffn(w, y, il, act) if il < hp.n_layer_dense_lead else experts(b, w, y, il, act)
        x = b.layer_out(ops.add(x, y), il)
    x = residuals.mix(x, b.w.output_res_score) if every else x
    b.finish(b.out_ids(hp.n_layer - 1, x)[0])
