"""mistral3: Ministral 3 and Mistral Small 3: llama with YaRN and a query temperature that grows with the position."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NORMAL
from ggraph.weights import Weights

from .llama import weights as llama_weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NORMAL)
    k = hp.keys
    return hp.replace(f_attn_temp_scale=float(k("attention.temperature_scale", 0.0)),
                      n_attn_temp_floor_scale=hp.n_ctx_orig_yarn,
                      yarn_beta_fast=float(k("rope.scaling.yarn_beta_fast", 32.0)),
                      yarn_beta_slow=float(k("rope.scaling.yarn_beta_slow", 1.0)),
                      rope_yarn_log_mul=float(k("rope.scaling.yarn_log_multiplier", 0.0)))


def weights(t: Weights) -> None:
    llama_weights(t)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        y = b.attn(w.attn_output, b.attn_temperature(b.rope(q, il), il), b.rope(k, il), v, il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        y = b.moe(w, y, il) if b.hp.n_expert else b.ffn(w, y, il)
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
