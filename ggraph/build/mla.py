"""Latent attention (MLA): K and V of all heads come from one small vector per token, and that vector is what is kept.

In: normed hidden states. Out: the attention's output projection. Where the file holds the matrix that makes K and V of a
latent vector in two halves, K's half goes to the queries and V's to the result, so that attention runs on the latent
vectors themselves: one KV head, whose V is the first part of its K. From one whole matrix K and V are made instead.
"""
from __future__ import annotations

from .. import ops
from ..tensor import Tensor
from ..weights import Group, Param
from .attention import Attention
from .core import split


class LatentAttention(Attention):
    def mla(self, w: Group, x: Tensor, il: int, scale: float, project: bool = True) -> Tensor:
        """Attention of layer `il` with the weights of `Group.mla`; `scale` of the products of Q and K. Without `project` the
        heads' results [n_embd_head_v_mla * n_head, n_tokens]."""
        hp = self.hp
        q = self._latent_q(w, x, il)                                          # [nope + rot, n_head, n_tokens]
        both = self.cb(self.mm(w.attn_kv_a_mqa, x), "kv_cmpr_pe", il)
        latent, k_pe = split(both, (hp.n_lora_kv, hp.n_rot))
        k_pe = self.rope(self.cb(self._heads(k_pe, (hp.n_rot, 1)), "k_pe", il), il)
        latent = self.norm(latent, w.attn_kv_a_norm, "kv_cmpr", il)
        attend = self._absorbed if hp.is_mla else self._decompressed
        return attend(w, q, latent, k_pe, il, scale, w.attn_output if project else None)

    def _latent_q(self, w: Group, x: Tensor, il: int) -> Tensor:
        hp = self.hp
        if hp.n_lora_q:
            x = self.norm(self.cb(self.mm(w.attn_q_a, x), "q", il), w.attn_q_a_norm, "q", il)
            q = self.mm(w.attn_q_b, x)
        else:
            q = self.mm(w.attn_q, x)
        return self.cb(ops.reshape(q, (hp.n_embd_head_k_mla, hp.n_head[il], self.n_tokens)), "q", il)

    def _absorbed(self, w: Group, q: Tensor, latent: Tensor, k_pe: Tensor, il: int, scale: float,
                  wo: Param | None) -> Tensor:
        hp = self.hp
        q_nope, q_pe = split(q, (hp.n_embd_head_k_mla - hp.n_rot, hp.n_rot))
        q_pe = self.rope(self.cb(q_pe, "q_pe", il), il)
        q_nope = self.mm(w.attn_k_b, ops.permute(q_nope, (0, 2, 1, 3)))
        q_nope = ops.permute(self.cb(q_nope, "q_nope_absorbed", il), (0, 2, 1, 3))        # [n_lora_kv, n_head, n_tokens]
        q = self.cb(ops.concat(q_nope, q_pe, 0), "Qcur", il)
        k = self.cb(ops.concat(ops.reshape(latent, (hp.n_lora_kv, 1, self.n_tokens)), k_pe, 0), "Kcur", il)
        return self.attn(wo, self.attn_temperature(q, il), k, None, il, scale=scale, v_b=w.attn_v_b)

    def _decompressed(self, w: Group, q: Tensor, latent: Tensor, k_pe: Tensor, il: int, scale: float,
                  wo: Param | None) -> Tensor:
        hp, n_head = self.hp, self.hp.n_head[il]
        nope, head_v = hp.n_embd_head_k_mla - hp.n_rot, hp.n_embd_head_v_mla
        kv = self.cb(self.mm(w.attn_kv_b, latent), "kv", il)
        k_nope, v = split(ops.reshape(kv, (nope + head_v, n_head, self.n_tokens)), (nope, head_v))
        q = self.rope(self.cb(q, "Qcur", il), il, offset=nope)
        k = self.cb(ops.concat(k_nope, ops.repeat(k_pe, (hp.n_rot, n_head, self.n_tokens)), 0), "Kcur", il)
        v = self.cb(ops.cont(v), "Vcur", il)
        return self.attn(wo, self.attn_temperature(q, il), k, v, il, scale=scale)
