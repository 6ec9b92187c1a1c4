"""granite_swa: Granite 4 with windows and attention sinks; the file says which layers have windows or rotate."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NORMAL
from ggraph.tensor import Tensor
from ggraph.weights import Group, Weights

from .granite import SCALES, inverse


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, *SCALES, rope_mode=NORMAL, rope_freq_base_swa=0.0, rope_freq_scale_swa=0.0)
    k = hp.keys
    hp = hp.replace(f_logit_scale=inverse(k.number("logit_scale")),
                    rope_layers=k.per_layer("attention.rope_pattern", hp.n_layer, True, convert=bool))
    windows = k.per_layer("attention.sliding_window_pattern", hp.n_layer, convert=bool)
    return hp.window(k("attention.sliding_window"), windows)


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings()
    t.rope_factors()
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        w.qkv(il)
        w.attn_out(il)
        w("attn_sinks", hp.n_head[il])
        if not hp.n_expert:
            w.ffn(il)
            continue
        w.experts(il, n_ff=hp.n_ff[il])
        if hp.n_ff_shexp:
            w("ffn_up_shexp", hp.n_embd, 2 * hp.n_ff_shexp)
            w("ffn_down_shexp", hp.n_ff_shexp, hp.n_embd)


def experts(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    y = b.moe(w, x, il)
    return b.add(y, b.ffn(w, x, il, suffix="_shexp"), "ffn_out", il) if b.hp.n_ff_shexp else y


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il, sinks=w.attn_sinks)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        y = experts(b, w, y, il) if b.hp.n_expert else b.ffn(w, y, il)
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
