"""bailingmoe: Ling and Ring, the first generation; shared experts beside those chosen by softmax."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NORMAL
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NORMAL)
    return hp.replace(f_attention_scale=hp.n_rot ** -0.5)


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings()
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        w.qkv(il)
        w.attn_out(il)
        w.experts(il)
        w.ffn(il, n_ff=hp.n_ff_exp[il] * hp.n_expert_shared, suffix="_shexp")


def graph(b: Builder) -> None:
    hp = b.hp
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        moe = b.moe(w, y, il, norm_w=hp.expert_weights_norm, w_scale=hp.expert_weights_scale)
        y = b.add(moe, b.ffn(w, y, il, suffix="_shexp"), "ffn_out", il)
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
