"""Selective state spaces: the layers of Mamba 1 and 2.

In: normed hidden states [n_embd, n_tokens]. Out: the layer's result, the same shape. Convolution inputs and states stay in the
layer's state rows.
"""
from __future__ import annotations

from .. import ops
from ..tensor import Tensor
from ..weights import Group, Param
from .core import split
from .recurrent import Recurrent


class Mamba(Recurrent):
    def mamba(self, w: Group, x: Tensor, il: int, norm: bool = False) -> Tensor:
        """Mamba 1 with the weights of `Group.mamba`: every channel is a head, with a decay for each of its d_state values.

        `norm`: the step, B and C are normed without weights; with weights they are wherever the file has them.
        """
        hp = self.hp
        x, z = split(self.by_seq(self.mm(w.ssm_in, x)), (hp.ssm_d_inner, hp.ssm_d_inner))
        x = ops.silu(self.conv(x, w.ssm_conv1d, il))
        dt, b, c = split(self.mm(w.ssm_x, x), (hp.ssm_dt_rank, hp.ssm_d_state, hp.ssm_d_state))
        if norm or vars(w).get("ssm_dt_norm"):
            norms: list[Param | None] = [vars(w).get(f"ssm_{name}_norm") for name in ("dt", "b", "c")]
            dt, b, c = (self.rms_norm(y, p, "norm", il) for y, p in zip((dt, b, c), norms))
        dt = self.linear(w.ssm_dt, dt)
        y = self.scan(ops.reshape(x, (1, *x.ne[:3])), dt, w.ssm_a.weight, _one_group(b), _one_group(c), il)
        y = ops.add(ops.reshape(y, x.ne), ops.mul(x, w.ssm_d.weight))
        return self.all_tokens(self.mm(w.ssm_out, ops.swiglu(z, y)), hp.n_embd)

    def mamba2(self, w: Group, x: Tensor, il: int) -> Tensor:
        """Mamba 2 with the weights of `Group.mamba2`: heads with one decay each, B and C shared by groups of heads."""
        hp, n_head, n_group, d_state = self.hp, self.hp.ssm_dt_rank, self.hp.ssm_n_group, self.hp.ssm_d_state
        head = (hp.ssm_d_inner // n_head, n_head)
        n = hp.ssm_d_inner + 2 * n_group * d_state
        z, xbc, dt = split(self.by_seq(self.mm(w.ssm_in, x)), (hp.ssm_d_inner, n, n_head))
        xbc = ops.silu(self.conv(xbc, w.ssm_conv1d, il))
        x, b, c = self.split_heads(xbc, head, (d_state, n_group), (d_state, n_group))
        y = self.scan(x, ops.add(dt, w.ssm_dt.weight), w.ssm_a.weight, b, c, il)
        y = self.cb(ops.add(y, ops.mul(x, w.ssm_d.weight)), "mamba2_y_add_d", il)
        y = ops.swiglu(self.split_heads(z, head)[0], y)
        norm: Param | None = w.ssm_norm
        if norm is not None:
            y = self.rms_norm(ops.reshape(y, (hp.ssm_d_inner // n_group, n_group, *y.ne[2:])), norm, "norm", il)
        return self.cb(self.mm(w.ssm_out, self.all_tokens(y, hp.ssm_d_inner)), "mamba_out", il)


def _one_group(x: Tensor) -> Tensor:
    """[n, n_seq_tokens, n_seqs] -> [n, 1, n_seq_tokens, n_seqs]"""
    return ops.view(x, (x.ne[0], 1, *x.ne[1:3]), (x.nb[0] * x.ne[0], *x.nb[1:3]))
