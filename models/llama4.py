"""llama4: Llama 4, text; chunked attention, every fourth layer without rotation but with a temperature, sigmoid experts."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.build.moe import SIGMOID
from ggraph.hparams import HParams
from ggraph.ops import NORMAL
from ggraph.weights import Weights

CHUNK, NO_ROPE_STEP = 8192, 4
N_EXPERT_MAVERICK = 128                              # the one without norms of Q and K


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NORMAL)
    chunked = int(hp.keys("attention.sliding_window", CHUNK)) > 0                 # 0 turns all of it off
    step = NO_ROPE_STEP if chunked else hp.n_layer
    hp = hp.replace(rope_layers=tuple((il + 1) % step != 0 for il in range(hp.n_layer)),
                    rope_freq_base_swa=float(hp.keys("rope.freq_base_swa", hp.rope_freq_base)))
    if not chunked:
        return hp
    hp = hp.replace(f_attn_temp_scale=0.1, f_attn_temp_offset=1.0, n_attn_temp_floor_scale=CHUNK)
    return hp.window(CHUNK, hp.swa_pattern(4), "chunked")


def has_experts(hp: HParams, il: int) -> bool:
    step = int(hp.keys("interleave_moe_layer_step"))
    return step > 0 and (il + 1) % step == 0


def weights(t: Weights) -> None:
    t.embeddings()
    t.rope_factors()
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        w.qkv(il)
        w.attn_out(il)
        if has_experts(t.hp, il):
            w.experts(il)
            w.ffn(il, n_ff=t.hp.n_ff_exp[il], suffix="_shexp")
        else:
            w.ffn(il)


def graph(b: Builder) -> None:
    hp = b.hp
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        q, k = b.rope(q, il), b.rope(k, il)
        if not hp.has_rope(il):
            q = b.attn_temperature(q, il)
        elif hp.n_expert != N_EXPERT_MAVERICK:
            q, k = b.norm(q, None, "Qcur_normed", il), b.norm(k, None, "Kcur_normed", il)
        y = b.attn(w.attn_output, q, k, v, il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        if has_experts(hp, il):
            shared = b.ffn(w, y, il, suffix="_shexp")
            y = b.moe(w, y, il, gating=SIGMOID, norm_w=False, choose_by_logits=True, weight_before_ffn=True)
            y = b.add(y, shared, "ffn_moe_out_merged", il)
        else:
            y = b.ffn(w, y, il)
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
