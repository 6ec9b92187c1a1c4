"""granite: Granite 3 and 4, dense or with experts; embeddings, residuals, attention and logits each have a scale."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NORMAL
from ggraph.tensor import Tensor
from ggraph.weights import Group, Weights

SCALES = ("attention.scale", "embedding_scale", "residual_scale")


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, *SCALES, rope_mode=NORMAL)
    rotated = bool(hp.keys("rope.scaling.finetuned", True))                       # Granite's switch for positions
    return hp.replace(f_logit_scale=inverse(hp.keys.number("logit_scale")), rope_layers=(rotated,) * hp.n_layer)


def inverse(scale: float) -> float:
    """What logits are multiplied with; 0, as in files for granitehybrid, leaves them as they are."""
    return 1.0 / scale if scale else 0.0


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings()
    t.rope_factors()
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        w.qkv(il)
        w.attn_out(il)
        if not hp.n_expert:
            w.ffn(il)
            continue
        w.experts(il, n_ff=hp.n_ff[il], gate=None)
        if hp.n_ff_shexp:
            w.ffn(il, n_ff=hp.n_ff_shexp, suffix="_shexp")


def experts(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    y = b.moe(w, x, il)
    return b.add(y, b.ffn(w, x, il, suffix="_shexp"), "ffn_out", il) if b.hp.n_ff_shexp else y


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        y = experts(b, w, y, il) if b.hp.n_expert else b.ffn(w, y, il)
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
