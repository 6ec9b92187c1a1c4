"""granitehybrid: Granite 4; granite whose layers are of Mamba 2 or of attention, with or without positions."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NORMAL
from ggraph.weights import Weights

from .granite import SCALES, experts, inverse


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, *SCALES, "logit_scale", rope_mode=NORMAL)
    rotated = bool(hp.keys("rope.scaling.finetuned", True))                       # Granite's switch for positions
    hp = hp.replace(f_logit_scale=inverse(hp.f_logit_scale), rope_layers=(rotated,) * hp.n_layer)
    return hp.recurrent(hp.layers_without_kv())


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings()
    t.rope_factors()
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        if hp.is_recurrent(il):
            w.mamba2()
        else:
            w.qkv(il)
            w.attn_out(il)
        if not hp.n_expert:
            w.ffn(il, bias=None)
            continue
        w.experts(il, n_ff=hp.n_ff[il], gate=None)
        if hp.n_ff_shexp:
            w.ffn(il, n_ff=hp.n_ff_shexp, suffix="_shexp")


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        if b.hp.is_recurrent(il):
            y = b.mamba2(w, y, il)
        else:
            q, k, v = b.qkv(w, y, il)
            y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        y = experts(b, w, y, il) if b.hp.n_expert else b.ffn(w, y, il)
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
