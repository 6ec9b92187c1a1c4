"""deepseek2: DeepSeek V2, V3 and R1, Kimi K2, GLM 4.7 Flash; latent attention, experts in groups, shared experts."""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.build.moe import SIGMOID, SOFTMAX
from ggraph.hparams import HParams
from ggraph.ops import NORMAL
from ggraph.tensor import Tensor
from ggraph.weights import Group, Weights

N_VOCAB_KANANA, N_VOCAB_GLM = 128256, 154880


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NORMAL)
    k = hp.keys
    lite = hp.n_layer in (26, 27) or (hp.n_layer == 48 and hp.n_vocab == N_VOCAB_KANANA)
    sigmoid = hp.n_layer in (47, 48) and hp.n_vocab == N_VOCAB_GLM                # old files do not name the function
    log_mul = float(k("rope.scaling.yarn_log_multiplier", 0.0)) / 0.1             # the converter multiplied it
    return hp.replace(n_lora_q=0 if lite else int(k("attention.q_lora_rank")),
                      rope_yarn_log_mul=log_mul, yarn_mscale=log_mul,
                      expert_gating_func=hp.expert_gating_func or (SIGMOID if sigmoid else SOFTMAX),
                      f_attn_temp_scale=float(k("attention.temperature_scale", 0.0)),
                      n_attn_temp_floor_scale=int(k("attention.temperature_length", 0)))


def weights(t: Weights) -> None:
    t.embeddings()
    for il, w in t.layers():
        layer_weights(t.hp, il, w)


def nextn_weights(t: Weights) -> None:
    layer_weights(t.hp, *t.nextn())


def layer_weights(hp: HParams, il: int, w: Group) -> None:
    w.norm("attn_norm", "ffn_norm")
    w.mla(il)
    if il < hp.n_layer_dense_lead:
        w.ffn(il)
    else:
        w.experts(il)
        w.ffn(il, n_ff=hp.n_ff_exp[il] * hp.n_expert_shared, suffix="_shexp")


def kq_scale(b: Builder) -> float:
    """1/sqrt(head size), times YaRN's factor squared: the rotated part of Q and K does not carry it."""
    r, log_factor = b.cp.rope, math.log(1.0 / b.cp.rope.freq_scale)
    attn_factor = r.attn_factor * (1.0 + 0.1 * log_factor)                        # without what the rope op divides by
    mscale = attn_factor * (1.0 + 0.1 * b.hp.rope_yarn_log_mul * log_factor)
    return mscale ** 2 / math.sqrt(b.hp.n_embd_head_k_mla)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        x = layer(b, w, x, il)
    b.finish(x)


def nextn_graph(b: Builder) -> None:
    b.nextn(layer)


def layer(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    hp = b.hp
    y = b.norm(x, w.attn_norm, "attn_norm", il)
    y = b.mla(w, y, il, kq_scale(b))
    y, x = b.out_ids(il, y, x)
    x = b.residual(x, y, "ffn_inp", il)
    y = b.norm(x, w.ffn_norm, "ffn_norm", il)
    y = b.ffn(w, y, il) if il < hp.n_layer_dense_lead else b.moe_and_shared(w, y, il)
    return b.layer_out(b.residual(x, y, "ffn_out", il), il)
