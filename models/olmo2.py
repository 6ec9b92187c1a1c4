"""olmo2: OLMo 2 and 3; norms after the blocks, Q and K normed whole, in OLMo 3 three of four layers with a window."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX, rope_scaling_swa=False)
    return hp.window(hp.keys("attention.sliding_window", 0), hp.swa_pattern(4))


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings()
    for il, w in t.layers():
        w.norm("attn_q_norm", n=hp.n_embd_head_k * hp.n_head[il])
        w.norm("attn_k_norm", n=hp.n_embd_k_gqa(il))
        w.norm("post_attention_norm", "post_ffw_norm")
        w.qkv(il)
        w.attn_out(il)
        w.ffn(il)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        q, k, v = b.qkv(w, x, il)
        q, k = b.qk_norm(w, q, k, il, whole=True)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, x = b.out_ids(il, y, x)
        y = b.norm(y, w.post_attention_norm, "attn_post_norm", il)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(b.ffn(w, x, il), w.post_ffw_norm, "ffn_post_norm", il)
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
