"""grok: Grok 1 and 2; norms around both blocks, soft caps, experts with GELU, in Grok 2 beside a dense feed-forward."""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX)
    k = hp.keys.number
    return hp.replace(f_logit_scale=k("logit_scale", 0.5773502691896257),              # Grok 1 files lack these keys
                      f_embedding_scale=k("embedding_scale", 78.38367176906169),
                      f_attention_scale=k("attention.output_scale", 0.08838834764831845),
                      f_attn_logit_softcapping=k("attn_logit_softcapping", 30.0),
                      f_final_logit_softcapping=k("final_logit_softcapping", 0.0),
                      yarn_ext_factor=k("rope.scaling.yarn_ext_factor", -1.0),
                      yarn_attn_factor=k("rope.scaling.yarn_attn_factor", 1.0),
                      yarn_beta_fast=k("rope.scaling.yarn_beta_fast", 8.0),
                      yarn_beta_slow=k("rope.scaling.yarn_beta_slow", 1.0))


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings()
    for il, w in t.layers():
        w.norm("attn_norm", "attn_output_norm", "ffn_norm")
        w.qkv(il)
        w.attn_out(il)
        w.experts(il, gate=None)
        w("ffn_up", hp.n_embd, hp.n_ff[il], optional=True)
        if w.ffn_up:
            w.ffn(il, gate=None)
        else:
            w.unused("ffn_gate.weight", "ffn_down.weight")
        w.norm("layer_output_norm", optional=True)
        w.norm("post_ffw_norm", optional=w.layer_output_norm is not None)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, b.norm(y, w.attn_output_norm, "attn_out_norm", il), "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        moe = b.moe(w, y, il, act="gelu")
        if w.ffn_up:
            both = b.add(b.ffn(w, y, il, act="gelu"), moe, "ffn_sum", il)
            moe = b.scale(both, math.sqrt(2) / 2, "ffn_out", il)
        y = b.norm(moe, w.layer_output_norm or w.post_ffw_norm, "ffn_post_norm", il)
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
