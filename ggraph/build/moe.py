"""Mixture of experts: choose experts per token, run them, add them up weighted.

In: normed hidden states [n_embd, n_tokens]. Out: the same shape. Every step of the routing is a node of its own.
"""
from __future__ import annotations

from .. import ops
from ..errors import ModelError
from ..tensor import Tensor
from ..weights import Group, Param
from .core import split
from .ffn import Activation, FeedForward

SOFTMAX, SIGMOID, SOFTMAX_WEIGHT, SQRT_SOFTPLUS = 1, 2, 3, 4          # `{arch}.expert_gating_func`


class Experts(FeedForward):
    def moe(self, w: Group, x: Tensor, il: int, *, act: Activation = "silu", gating: int = SOFTMAX, norm_w: bool = True,
            w_scale: float = 0.0, limit: float = 0.0, logits: Tensor | None = None, choose_by_logits: bool = False,
            weight_before_ffn: bool = False) -> Tensor:
        """Experts of `blk.{il}`: router, gate/up/down of the chosen ones, weighted sum.

        `norm_w` makes the chosen weights sum to 1, `w_scale` multiplies them (0: not), `limit` bounds gate and up before
        they are multiplied (0: not), `logits` replaces the router's product. `choose_by_logits`: not by what the gating
        makes of them.
        """
        chosen, weights = self._route(w, x, il, gating, norm_w, w_scale, logits, choose_by_logits)
        return self.experts(w, x, chosen, weights, il, act=act, limit=limit, weight_before_ffn=weight_before_ffn)

    def moe_and_shared(self, w: Group, x: Tensor, il: int, *, act: Activation = "silu") -> Tensor:
        """Experts chosen and weighted as the file's keys say, and the shared one beside them where the layer has one."""
        hp = self.hp
        y = self.moe(w, x, il, act=act, gating=hp.expert_gating_func, norm_w=hp.expert_weights_norm,
                     w_scale=hp.expert_weights_scale)
        return self.add(y, self.ffn(w, x, il, act, suffix="_shexp"), "ffn_out", il) if "ffn_up_shexp" in vars(w) else y

    def experts(self, w: Group, x: Tensor, chosen: Tensor, weights: Tensor, il: int, *, act: Activation = "silu",
                limit: float = 0.0, weight_before_ffn: bool = False, suffix: str = "_exps") -> Tensor:
        """The weighted sum of the chosen experts; chosen I32 [n_used, n_tokens], weights [1, n_used, n_tokens]."""
        y = ops.reshape(x, (x.ne[0], 1, x.ne[1]))
        if weight_before_ffn:
            y = ops.mul(ops.repeat(y, (x.ne[0], chosen.ne[0], x.ne[1])), weights)
        y = self._experts(w, y, chosen, il, act, limit, suffix)
        if not weight_before_ffn:
            y = self.cb(ops.mul(y, weights), "ffn_moe_weighted", il)
        return self.cb(self._sum(y), "ffn_moe_out", il)

    def _route(self, w: Group, x: Tensor, il: int, gating: int, norm_w: bool, w_scale: float, logits: Tensor | None,
               choose_by_logits: bool) -> tuple[Tensor, Tensor]:
        """(chosen experts I32 [n_used, n_tokens], their weights [1, n_used, n_tokens])"""
        if logits is None:
            logits = self.linear(w.ffn_gate_inp, x, "ffn_moe_logits", il)
        probs = self.cb(_probs(logits, gating), "ffn_moe_probs", il)
        bias: Param | None = w.exp_probs_b
        selection = logits if choose_by_logits else probs
        if bias is not None:
            selection = self.cb(ops.add(selection, bias.weight), "ffn_moe_probs_biased", il)
        chosen = self.cb(ops.top_k(self.limit_groups(selection, il), self.hp.n_expert_used[il]), "ffn_moe_topk", il)
        return chosen, self.expert_weights(probs, chosen, il, gating, norm_w, w_scale)

    def expert_weights(self, probs: Tensor, chosen: Tensor, il: int, gating: int = SOFTMAX, norm_w: bool = True,
                       w_scale: float = 0.0) -> Tensor:
        """[1, n_used, n_tokens] from probs [n_expert, n_tokens] of chosen I32 [n_used, n_tokens]; options as in `moe`."""
        n_used, n_tokens = chosen.ne[0], chosen.ne[1]
        weights = self.cb(ops.get_rows(ops.reshape(probs, (1, probs.ne[0], n_tokens)), chosen), "ffn_moe_weights", il)
        weights = ops.reshape(weights, (n_used, n_tokens))
        if gating == SOFTMAX_WEIGHT:
            weights = self.cb(ops.soft_max(weights), "ffn_moe_weights_softmax", il)
        if norm_w:
            total = ops.clamp(ops.sum_rows(weights), 6.103515625e-5, float("inf"))        # the smallest normal F16
            weights = self.cb(ops.div(weights, total), "ffn_moe_weights_norm", il)
        if w_scale not in (0.0, 1.0):
            weights = self.cb(ops.scale(weights, w_scale), "ffn_moe_weights_scaled", il)
        return ops.reshape(weights, (1, n_used, n_tokens))

    def limit_groups(self, selection: Tensor, il: int) -> Tensor:
        """Only experts of the best groups stay: a group counts as much as its two best experts (DeepSeek V3)."""
        hp, n_tokens = self.hp, selection.ne[1]
        if hp.n_expert_groups <= 1:
            return selection
        n_expert, per_group = selection.ne[0], selection.ne[0] // hp.n_expert_groups
        groups = ops.reshape(selection, (per_group, hp.n_expert_groups, n_tokens))
        best = ops.get_rows(ops.reshape(groups, (1, *groups.ne[:3])), ops.top_k(groups, 2))          # [1, 2, n_groups, n_tokens]
        scores = ops.reshape(ops.sum_rows(ops.reshape(best, best.ne[1:])), (hp.n_expert_groups, n_tokens))
        chosen = self.cb(ops.top_k(scores, hp.n_group_used), "ffn_moe_group_topk", il)
        kept = ops.get_rows(groups, chosen)                            # [per_group, n_group_used, n_tokens]
        masked = ops.set_rows(ops.fill(groups, float("-inf")), kept, chosen)
        return self.cb(ops.reshape(masked, (n_expert, n_tokens)), "ffn_moe_probs_masked", il)

    def _experts(self, w: Group, x: Tensor, chosen: Tensor, il: int, act: Activation, limit: float, suffix: str) -> Tensor:
        """x [n_embd, 1 or n_used, n_tokens] -> the chosen experts' results [n_embd, n_used, n_tokens]"""
        gate_up, gate_w = (vars(w).get(f"ffn_{name}{suffix}") for name in ("gate_up", "gate"))
        gate: Tensor | None
        if gate_up is not None:
            both = self._expert_linear(gate_up, x, chosen, "ffn_moe_gate_up", il)
            gate, up = split(both, (both.ne[0] // 2,) * 2)
        else:
            up = self._expert_linear(getattr(w, "ffn_up" + suffix), x, chosen, "ffn_moe_up", il)
            gate = None if gate_w is None else self._expert_linear(gate_w, x, chosen, "ffn_moe_gate", il)
        if limit:
            assert gate is not None and act == "silu"
            y = ops.swiglu_clamp(gate, up, limit)
        else:
            y = self.activate(up, act) if gate is None else self.gated(gate, up, act)
        down = getattr(w, "ffn_down" + suffix)
        return self._expert_linear(down, self.cb(y, "ffn_moe_act", il), chosen, "ffn_moe_down", il)

    def _expert_linear(self, p: Param, x: Tensor, chosen: Tensor, name: str, il: int) -> Tensor:
        y = self.cb(ops.mul_mat_id(p.weight, x, chosen), name, il)
        if p.scale is not None:
            flat = ops.reshape(chosen, (chosen.ne[0] * chosen.ne[1],))
            picked = ops.get_rows(ops.reshape(p.scale, (1, p.scale.ne[0])), flat)
            y = ops.mul(y, ops.reshape(picked, (1, chosen.ne[0], chosen.ne[1])))
        for pair, scale in self._pairs(p.weight):
            thin = self._scaled(ops.mul_mat_id(pair.a, x, chosen), pair, scale)
            y = ops.add(y, ops.mul_mat_id(pair.b, thin, chosen))
        return y if p.bias is None else self.cb(ops.add_id(y, p.bias, chosen), name + "_biased", il)

    def _sum(self, experts: Tensor) -> Tensor:
        """[n_embd, n_used, n_tokens] -> [n_embd, n_tokens], added in the order of choice"""
        n, used, n_tokens, _ = experts.ne
        parts = [ops.view(experts, (n, n_tokens), (experts.nb[2],), i * experts.nb[1]) for i in range(used)]
        total = parts[0] if used > 1 else ops.cont(parts[0])
        for part in parts[1:]:
            total = ops.add(total, part)
        return total


def _probs(logits: Tensor, gating: int) -> Tensor:
    if gating == SIGMOID:
        return ops.sigmoid(logits)
    if gating == SQRT_SOFTPLUS:
        return ops.sqrt(ops.softplus(logits))
    if gating not in (SOFTMAX, SOFTMAX_WEIGHT):
        raise ModelError(f"the file names expert gating function {gating}; known ones are 1 to 4")
    return logits if gating == SOFTMAX_WEIGHT else ops.soft_max(logits)
