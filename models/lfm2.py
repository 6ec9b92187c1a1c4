"""lfm2: Liquid LFM 2 and 2.5, dense or with experts; layers of a short gated convolution or of attention."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph import ops
from ggraph.build import Builder
from ggraph.build.core import split
from ggraph.errors import ModelError
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.tensor import Tensor
from ggraph.weights import Group, Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX)
    if not hp.causal:
        raise ModelError("LFM 2 as an embedding model, whose convolutions look both ways, is not supported")
    conv = hp.layers_without_kv()
    hp = hp.recurrent(conv, n_embd_r=hp.n_embd * (int(hp.keys.number("shortconv.l_cache")) - 1), n_embd_s=0,
                      n_layer_dense_lead=hp.n_layer_dense_lead if hp.n_expert else hp.n_layer)
    return hp if hp.n_expert else hp.window(hp.keys("attention.sliding_window", 0), [not c for c in conv])


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings(norm=False)
    t.norm("token_embd_norm")
    t.unused("dense_2.weight", "dense_2.bias")                                    # of embeddings, see `graph`
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        if hp.is_recurrent(il):
            w("shortconv.in_proj", hp.n_embd, 3 * hp.n_embd)
            w("shortconv.conv", hp.keys.number("shortconv.l_cache"), hp.n_embd)
            w("shortconv.out_proj", hp.n_embd, hp.n_embd)
        else:
            w.norm("attn_q_norm", "attn_k_norm", n=hp.n_embd_head_k)
            w.qkv(il)
            w.attn_out(il, bias=False)
        if il < hp.n_layer_dense_lead:
            w.ffn(il)
        else:
            w.experts(il, n_ff=hp.n_ff_exp[il], probs_bias=True)


def short_conv(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    """out(C * conv(B * X)), where B, C and X are the three parts of one projection."""
    both = b.by_seq(b.linear(w.shortconv_in_proj, x, "model.layers.{}.conv.in_proj", il))
    before, after, x = split(both, (b.hp.n_embd,) * 3)
    y = b.cb(b.conv(ops.mul(before, x), w.shortconv_conv, il), "model.layers.{}.conv.conv", il)
    y = b.all_tokens(ops.mul(y, after), b.hp.n_embd)
    return b.linear(w.shortconv_out_proj, y, "model.layers.{}.conv.out_proj", il)


def graph(b: Builder) -> None:
    hp = b.hp
    if b.cp.embeddings and b.w.shape("dense_2.weight"):
        raise ModelError("embeddings of LFM 2 that a further matrix projects (dense_2) are not supported")
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "model.layers.{}.operator_norm", il)
        if hp.is_recurrent(il):
            y = short_conv(b, w, y, il)
        else:
            q, k, v = b.qkv(w, y, il)
            q, k = b.qk_norm(w, q, k, il)
            y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "model.layers.{}.ffn_norm", il)
        if il < hp.n_layer_dense_lead:
            y = b.ffn(w, y, il)
        else:
            y = b.moe(w, y, il, gating=hp.expert_gating_func)
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(b.norm(x, b.w.token_embd_norm, "result_norm"), norm=False)
