"""nemotron_h: Nemotron H and Nemotron 3; each layer is one block: Mamba 2, attention without positions, or a feed-forward."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.build.moe import SIGMOID
from ggraph.hparams import HParams
from ggraph.tensor import Tensor
from ggraph.weights import Group, Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv)
    attention = [n_kv > 0 and n_ff == 0 for n_kv, n_ff in zip(hp.n_head_kv, hp.n_ff)]
    recurrent = [n_kv == 0 and n_ff == 0 for n_kv, n_ff in zip(hp.n_head_kv, hp.n_ff)]
    attention[hp.n_layer:] = [True] * hp.n_layer_nextn
    hp = hp.replace(n_head_kv=tuple(n if attn else 0 for n, attn in zip(hp.n_head_kv, attention)),
                    f_norm_rms_eps=hp.f_norm_rms_eps or hp.f_norm_eps)
    return hp.recurrent(recurrent)


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings()
    for il, w in t.layers():
        w.norm("attn_norm")
        if hp.is_recurrent(il):
            w.mamba2()
        elif hp.has_kv(il):
            w.qkv(il)
            w.attn_out(il)
        elif hp.n_expert:
            expert_weights(hp, w, il, hp.n_ff_expert(il))
        else:
            w.ffn(il, bias=None, gate=False)


def nextn_weights(t: Weights) -> None:
    """Attention and experts in one layer."""
    il, w = t.nextn()
    w.norm("attn_norm", "post_attention_norm")
    w.qkv(il)
    w.attn_out(il)
    expert_weights(t.hp, w, il, t.hp.n_ff_exp[il] or t.hp.n_ff[0] // max(t.hp.n_expert_used[il], 1))


def expert_weights(hp: HParams, w: Group, il: int, n_ff: int) -> None:
    """Experts without gates; in some models they work on a projection to a smaller space."""
    n = int(hp.keys("moe_latent_size", 0)) or hp.n_embd
    w.experts(il, n_ff=n_ff, gate=False, probs_bias=True, n_embd=n)
    w("ffn_latent_down", hp.n_embd, n, optional=True)
    w("ffn_latent_up", n, hp.n_embd, optional=True)
    w.ffn(il, gate=False, n_ff=hp.n_ff_shexp, suffix="_shexp")


def experts(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    """The router and the shared expert see the whole input."""
    logits = b.linear(w.ffn_gate_inp, x, "ffn_moe_logits", il)
    y = b.mm(w.ffn_latent_down, x) if w.ffn_latent_down else x
    y = b.moe(w, y, il, act="relu_sqr", gating=SIGMOID, norm_w=b.hp.expert_weights_norm, w_scale=b.hp.expert_weights_scale,
              logits=logits)
    y = b.mm(w.ffn_latent_up, y) if w.ffn_latent_up else y
    return b.add(y, b.ffn(w, x, il, act="relu_sqr", suffix="_shexp"), "ffn_out", il)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        if b.hp.is_recurrent(il):
            y = b.mamba2(w, y, il)
        elif b.hp.has_kv(il):
            y = b.attn(w.attn_output, *b.qkv(w, y, il), il)
        else:
            y = b.layer_out(experts(b, w, y, il) if b.hp.n_expert else b.ffn(w, y, il, act="relu_sqr"), il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "nemotron_h_block_out", il)
    b.finish(x)


def nextn_graph(b: Builder) -> None:
    b.nextn(nextn_layer, norm=b.layer_norm)


def nextn_layer(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    y = b.norm(x, w.attn_norm, "attn_norm", il)
    y = b.attn(w.attn_output, *b.qkv(w, y, il), il)
    y, x = b.out_ids(il, y, x)
    x = b.residual(x, y, "ffn_inp", il)
    y = experts(b, w, b.norm(x, w.post_attention_norm, "attn_post_norm", il), il)
    return b.layer_out(b.residual(x, y, "ffn_out", il), il)
