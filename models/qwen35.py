"""qwen35: Qwen 3.5; three of four layers a gated delta net, the others attention with a gate on its output."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ggraph import ops
from ggraph.build import Builder
from ggraph.build.core import split
from ggraph.hparams import HParams
from ggraph.tensor import Tensor
from ggraph.weights import Group, Need, Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=ops.IMROPE)
    return hp.recurrent(hp.recurrent_pattern(4))


def conv_dim(hp: HParams) -> int:
    """Channels of the convolution: Q and K of n_group heads, V of dt_rank heads."""
    return hp.ssm_d_inner + 2 * hp.ssm_n_group * hp.ssm_d_state


def weights(t: Weights) -> None:
    t.embeddings()
    for il, w in t.layers():
        w.norm("attn_norm", "post_attention_norm")
        if t.hp.is_recurrent(il):
            delta_net_weights(t.hp, w)
        else:
            gated_attention_weights(t.hp, w, il)
        w.ffn(il)


def nextn_weights(t: Weights) -> None:
    il, w = t.nextn()
    w.norm("attn_norm", "post_attention_norm")
    gated_attention_weights(t.hp, w, il)
    w.ffn(il)


def delta_net_weights(hp: HParams, w: Group) -> None:
    w("attn_qkv", hp.n_embd, conv_dim(hp))
    w("attn_gate", hp.n_embd, hp.ssm_d_inner)
    w("ssm_conv1d", hp.ssm_d_conv, conv_dim(hp))
    w("ssm_dt", hp.ssm_dt_rank, suffix=".bias")
    w("ssm_a", hp.ssm_dt_rank, suffix="")
    w("ssm_beta", hp.n_embd, hp.ssm_dt_rank)
    w("ssm_alpha", hp.n_embd, hp.ssm_dt_rank)
    w("ssm_norm", hp.ssm_d_state)
    w("ssm_out", hp.ssm_d_inner, hp.n_embd)


def gated_attention_weights(hp: HParams, w: Group, il: int, bias: Need = None) -> None:
    head = hp.n_embd_head_k
    w.qkv(il, bias=bias, head_q=2 * head)
    w("attn_output", head * hp.n_head[il], hp.n_embd)
    w.norm("attn_q_norm", "attn_k_norm", n=head)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        x = layer(b, w, x, il)
    b.finish(x)


def nextn_graph(b: Builder) -> None:
    b.nextn(layer)


def layer(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    y = b.norm(x, w.attn_norm, "attn_norm", il)
    y = delta_net(b, w, y, il) if b.hp.is_recurrent(il) else gated_attention(b, w, y, il)
    y, x = b.out_ids(il, y, x)
    x = b.residual(x, y, "attn_residual", il)
    y = b.norm(x, w.post_attention_norm, "attn_post_norm", il)
    return b.layer_out(b.residual(x, b.ffn(w, y, il), "post_ffn", il), il)


def gated_attention(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    """The rows of Q hold a head's Q and its gate, head by head."""
    hp, n = b.hp, b.hp.n_embd_head_k
    both, k, v = b.qkv(w, x, il, head_q=2 * n)
    q, gate = split(both, (n, n))
    q, k = b.qk_norm(w, q, k, il)
    y = b.attn(None, b.rope(q, il), b.rope(k, il), v, il, seen=b.choose_blocks(w, x, il))
    y = b.cb(y, "attn_pregate", il)
    gate = b.cb(ops.sigmoid(ops.cont(gate, (n * hp.n_head[il], b.n_tokens))), "gate_sigmoid", il)
    return b.linear(w.attn_output, b.cb(ops.mul(y, gate), "attn_gated", il), "attn_output", il)


def delta_net(b: Builder, w: Group, x: Tensor, il: int, act: Callable[[Tensor], Tensor] = ops.silu) -> Tensor:
    """`act` makes a gate of z."""
    qkv = b.linear(w.attn_qkv, x, "linear_attn_qkv_mixed", il)
    z = b.linear(w.attn_gate, x, "z", il)
    beta, alpha = b.linear(w.ssm_beta, x, "beta", il), b.linear(w.ssm_alpha, x, "alpha", il)
    return delta_rule(b, w, qkv, z, beta, alpha, il, act)


def delta_rule(b: Builder, w: Group, qkv: Tensor, z: Tensor, beta: Tensor, alpha: Tensor, il: int,
               act: Callable[[Tensor], Tensor] = ops.silu, neighbours: bool = False) -> Tensor:
    """All projections [.., n_tokens]. `neighbours`: a key head serves neighbouring value heads, not every n_group-th."""
    hp, d, n_head = b.hp, b.hp.ssm_d_state, b.hp.ssm_dt_rank
    head = (hp.ssm_d_inner // n_head, n_head)
    beta = b.cb(ops.sigmoid(b.by_seq(beta, 1, n_head)), "beta_sigmoid", il)
    softplus = b.cb(ops.softplus(ops.add(alpha, w.ssm_dt.weight)), "a_softplus", il)
    gate = b.cb(ops.mul(softplus, w.ssm_a.weight), "gate", il)

    mixed = b.cb(ops.silu(b.conv(b.by_seq(qkv), w.ssm_conv1d, il)), "conv_output_silu", il)
    q, k, v = b.split_heads(mixed, (d, hp.ssm_n_group), (d, hp.ssm_n_group), head)
    q, k = (b.l2_norm(y, name, il) for y, name in ((q, "q_conv_predelta"), (k, "k_conv_predelta")))
    if neighbours:
        q, k = (b.repeat_heads(y, n_head) for y in (q, k))
    y = b.delta_net(q, k, v, b.by_seq(gate, 1, n_head), beta, il)
    y = ops.mul(b.norm(y, w.ssm_norm, "attn_out_norm", il), act(b.by_seq(z, *head)))
    return b.linear(w.ssm_out, b.cb(b.all_tokens(y, hp.ssm_d_inner), "final_output", il), "linear_attn_out", il)
