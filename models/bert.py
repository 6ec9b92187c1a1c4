"""bert: BERT and its heirs (nomic-bert, nomic-bert-moe, jina-bert-v3); norms after both blocks, every token sees all others.

Positions are learned where the file has them, else rotary; the feed-forward has a gate, none, or experts, as the file says.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX, cache=False, head=False, f_norm_rms_eps=0.0)
    return hp.replace(rope_mode=None, n_pos=hp.n_ctx_train) if hp.arch == "bert" else hp


def weights(t: Weights) -> None:
    hp = t.hp
    every = int(hp.keys("moe_every_n_layers", 0))
    t.encoder(token_types=None)
    if hp.n_pos:
        t("position_embd", hp.n_embd, hp.n_pos)
    for il, w in t.layers():
        w.qkv(il)
        w.attn_out(il)
        w.norm("attn_output_norm", "layer_output_norm", bias=None)
        if every and il % every == 1:
            w.experts(il, gate=False)
        else:
            w.ffn(il, gate=hp.arch == "nomic-bert")


def graph(b: Builder) -> None:
    x = b.add_token_type(b.inp_embd())
    if b.hp.n_pos:
        x = b.add_positions(x, b.w.position_embd)
    x = b.norm(x, b.w.token_embd_norm, "inp_norm")
    for il, w in b.layers():
        q, k, v = b.qkv(w, x, il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, x = b.out_ids(il, y, x)
        x = b.norm(b.residual(x, y, "attn_residual", il), w.attn_output_norm, "ffn_inp", il)
        y = b.moe(w, x, il, act="gelu", norm_w=False) if "ffn_up_exps" in vars(w) else \
            b.ffn(w, x, il, act="silu" if "ffn_gate" in vars(w) else "gelu")
        x = b.norm(b.residual(x, y, "ffn_residual", il), w.layer_output_norm, "l_out", il)
    b.finish(x, norm=False)
