"""mimo2: MiMo 2; windows with rotation of their own, attention sinks, layers with experts or dense as the file has them."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.build.moe import SIGMOID
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.tensor import Tensor
from ggraph.weights import Group, Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX, rope_freq_scale_swa=1.0, nextn_normed=False)
    hp = hp.replace(rope_freq_base_swa=float(hp.keys("rope.freq_base_swa", 10000.0)))
    hp.keys("attention.sliding_window_pattern")
    return hp.window(hp.keys("attention.sliding_window"), hp.swa_pattern(0))


def weights(t: Weights) -> None:
    t.embeddings()
    for il, w in t.layers():
        layer_weights(t.hp, il, w)


def nextn_weights(t: Weights) -> None:
    il, w = t.nextn()
    layer_weights(t.hp, il, w)
    w.norm("layer_output_norm", optional=True)
    w.alias("nextn_shared_head_norm", w.nextn_shared_head_norm or w.layer_output_norm)


def layer_weights(hp: HParams, il: int, w: Group) -> None:
    w.norm("attn_norm", "ffn_norm")
    w.qkv(il, bias=False)
    w.unused("attn_qkv.bias", "attn_q.bias", "attn_k.bias", "attn_v.bias")
    w.attn_out(il)
    w("attn_sinks", hp.n_head[il], optional=True)
    if w("ffn_gate_inp", hp.n_embd, hp.n_expert, optional=True):
        w.experts(il, gate=None)
        w.unused(*(f"ffn_{name}.weight" for name in ("gate", "up", "down")))
    else:
        w.ffn(il, gate=None)
        w.unused("exp_probs_b.bias", *(f"ffn_{name}_exps.weight" for name in ("gate", "up", "down")))


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        x = layer(b, w, x, il)
    b.finish(x)


def nextn_graph(b: Builder) -> None:
    b.nextn(layer)


def layer(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    value_scale = float(b.hp.keys("attention.value_scale", 1.0))
    y = b.norm(x, w.attn_norm, "attn_norm", il)
    q, k, v = b.qkv(w, y, il)
    y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il, sinks=w.attn_sinks)
    if value_scale not in (0.0, 1.0):
        y = b.scale(y, value_scale, "attn_out_scaled", il)
    y, x = b.out_ids(il, y, x)
    x = b.residual(x, y, "ffn_inp", il)
    y = b.norm(x, w.ffn_norm, "ffn_norm", il)
    y = b.moe(w, y, il, gating=SIGMOID) if w.ffn_gate_inp else b.ffn(w, y, il)
    return b.layer_out(b.residual(x, y, "ffn_out", il), il)
