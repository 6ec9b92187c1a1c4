"""plamo3: PLaMo 3; norms around both blocks, Q and K normed per head, seven of eight layers with a window."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX, rope_freq_scale_swa=1.0)
    hp = hp.replace(rope_freq_base_swa=float(hp.keys("rope.freq_base_swa", 10000.0)))
    return hp.window(hp.keys("attention.sliding_window", 0), hp.swa_pattern(8))


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings()
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        w.norm("attn_q_norm", "attn_k_norm", n=hp.n_embd_head_k)
        w("post_attention_norm", hp.n_embd, suffix="")               # these two are named without ".weight"
        w("post_ffw_norm", hp.n_embd, suffix="")
        w.qkv(il)
        w.attn_out(il)
        w("ffn_up", hp.n_embd, 2 * hp.n_ff[il])
        w("ffn_down", hp.n_ff[il], hp.n_embd)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        q, k = b.qk_norm(w, q, k, il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, x = b.out_ids(il, y, x)
        y = b.norm(y, w.post_attention_norm, "attn_post_norm", il)
        x = b.residual(x, y, "attn_residual", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        y = b.norm(b.ffn(w, y, il), w.post_ffw_norm, "ffn_post_norm", il)
        x = b.layer_out(b.residual(x, y, "ffn_residual", il), il)
    b.finish(x)
