"""plamo2: PLaMo 2; norms around both blocks, layers of attention or of state spaces with heads, fed as those of Mamba 1."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph import ops
from ggraph.build import Builder
from ggraph.build.core import split
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.tensor import Tensor
from ggraph.weights import Group, Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX)
    hp = hp.replace(f_attention_scale=hp.n_embd_head_v ** -0.5)
    return hp.recurrent(hp.layers_without_kv())


def dt_dim(hp: HParams) -> int:
    return max(64, hp.n_embd // 16)


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings()
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        for name in ("post_attention_norm", "post_ffw_norm"):
            w(name, hp.n_embd, suffix="")
        if hp.is_recurrent(il):
            mamba_weights(hp, w)
        else:
            n_head, n_kv = hp.n_head[il], hp.n_head_kv[il]
            w("attn_qkv", hp.n_embd, hp.n_embd_head_k * (n_head + n_kv) + hp.n_embd_head_v * n_kv)
            w("attn_q_norm", hp.n_embd_head_k, n_head)
            w("attn_k_norm", hp.n_embd_head_k, n_kv)
            w.attn_out(il, bias=False)
        w("ffn_up", hp.n_embd, 2 * hp.n_ff[il])
        w("ffn_down", hp.n_ff[il], hp.n_embd)


def mamba_weights(hp: HParams, w: Group) -> None:
    inner, n_head, n_dt = hp.ssm_d_inner, hp.ssm_dt_rank, dt_dim(hp)
    w("ssm_in", hp.n_embd, 2 * inner)
    w("ssm_conv1d", hp.ssm_d_conv, inner)
    w("ssm_x", inner, n_dt + 2 * hp.ssm_d_state)
    w("ssm_dt", n_dt, n_head, bias=True)
    for name, n in (("ssm_a", n_head), ("ssm_d", n_head), ("ssm_dt_norm", n_dt), ("ssm_b_norm", hp.ssm_d_state),
                    ("ssm_c_norm", hp.ssm_d_state)):
        w(name, n, suffix="")
    w("ssm_out", inner, hp.n_embd)


def mamba(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    """Each head's part of the projection holds z, then x."""
    hp, n_head, d_state = b.hp, b.hp.ssm_dt_rank, b.hp.ssm_d_state
    n = hp.ssm_d_inner // n_head
    both = b.by_seq(b.linear(w.ssm_in, x, "mamba_in_proj", il), 2 * n, n_head)
    z, x = split(both, (n, n))
    x = ops.cont(x, (hp.ssm_d_inner, *x.ne[2:]))
    x = b.cb(ops.silu(b.conv(x, w.ssm_conv1d, il)), "mamba_conv1d_silu", il)
    bb, cc, dt = split(b.linear(w.ssm_x, x, "mamba_bcdt_proj", il), (d_state, d_state, dt_dim(hp)))
    bb = b.rms_norm(bb, w.ssm_b_norm, "mamba_B_normed", il)
    cc = b.rms_norm(cc, w.ssm_c_norm, "mamba_C_normed", il)
    dt = b.linear(w.ssm_dt, b.rms_norm(dt, w.ssm_dt_norm, "mamba_dt_normed", il), "mamba_dt_proj", il)
    bb, cc = (ops.reshape(y, (d_state, 1, *y.ne[1:3])) for y in (bb, cc))
    x = ops.reshape(x, (n, n_head, *x.ne[1:3]))
    y = b.scan(x, dt, ops.reshape(w.ssm_a.weight, (1, n_head)), bb, cc, il)
    y = b.cb(ops.add(y, ops.mul(x, ops.reshape(w.ssm_d.weight, (1, n_head)))), "mamba_y_add_d", il)
    y = b.cb(ops.swiglu(z, y), "mamba_y_swiglu_z", il)
    return b.linear(w.ssm_out, b.all_tokens(y, hp.ssm_d_inner), "mamba_out", il)


def attention(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    q, k, v = b.qkv(w, x, il)
    q, k = b.qk_norm(w, q, k, il)
    return b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        y = mamba(b, w, y, il) if b.hp.is_recurrent(il) else attention(b, w, y, il)
        y, x = b.out_ids(il, y, x)
        y = b.norm(y, w.post_attention_norm, "attn_post_norm", il)
        x = b.residual(x, y, "attn_residual", il)
        y = b.norm(x, w.ffn_norm, "ffn_pre_norm", il)
        y = b.norm(b.ffn(w, y, il), w.post_ffw_norm, "ffn_post_norm", il)
        x = b.residual(x, y, "ffn_residual", il)
    b.finish(x)
