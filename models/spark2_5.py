"""spark2_5: Spark 2.5; a gate of each head on the attention's output, windows, a GELU feed-forward."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph import ops
from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX)
    layers = hp.keys.per_layer("attention.sliding_window_pattern", hp.n_layer, convert=bool)
    hp = hp.replace(n_rot_swa=int(hp.keys("rope.dimension_count_swa", 0)),
                    rope_freq_base_swa=float(hp.keys("rope.freq_base_swa", hp.rope_freq_base)))
    return hp.window(hp.keys("attention.sliding_window"), layers)


def weights(t: Weights) -> None:
    t.embeddings()
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        w.qkv(il)
        w("attn_gate", t.hp.n_embd, t.hp.n_head[il])
        w.attn_out(il)
        w.ffn(il)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        n = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, n, il)
        y = b.attn(None, b.rope(q, il), b.rope(k, il), v, il)
        gate = b.cb(ops.sigmoid(b.linear(w.attn_gate, n)), "attn_gate", il)
        y = b.linear(w.attn_output, b.gate_attn(y, gate, il), "attn_out_proj", il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        x = b.layer_out(b.residual(x, b.ffn(w, y, il, act="gelu"), "ffn_out", il), il)
    b.finish(x)
