"""mpt: MPT; ALiBi or learned positions, layer norms with or without bias, a feed-forward without a gate."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, "attention.clamp_kqv", "attention.max_alibi_bias", f_norm_rms_eps=0.0)
    return hp if hp.f_max_alibi_bias else hp.replace(n_pos=hp.n_ctx_train)


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings(norm_bias=None)
    t("position_embd", hp.n_embd, hp.n_ctx_train, optional=True)
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm", bias=None)
        w.norm("attn_q_norm", "attn_k_norm", bias=None, optional=True)
        w.qkv(il)
        w.attn_out(il)
        w.ffn(il, gate=False)
        w("ffn.act", hp.n_ff[il], suffix=".scales", optional=True)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    if b.w.position_embd:
        x = b.add_positions(x, b.w.position_embd)
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        if w.attn_q_norm:
            q, k = b.qk_norm(w, q, k, il, whole=True)
        y = b.attn(w.attn_output, q, k, v, il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        x = b.layer_out(b.residual(x, b.ffn(w, y, il, act="gelu"), "ffn_out", il), il)
    b.finish(x)
