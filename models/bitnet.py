"""bitnet: BitNet b1.58; llama with norms before the output matrices of both blocks; ternary matrices have a scale each."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph import ops
from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    return HParams.read(kv, rope_mode=NEOX)


def weights(t: Weights) -> None:
    t.embeddings(output_bias=False)
    for il, w in t.layers():
        w.norm("attn_norm", "attn_sub_norm", "ffn_norm")
        w.norm("ffn_sub_norm", n=t.hp.n_ff[il])
        w.qkv(il)
        w.attn_out(il)
        w.ffn(il, bias=False)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        y = b.attn(None, b.rope(q, il), b.rope(k, il), v, il)
        y = b.linear(w.attn_output, b.norm(y, w.attn_sub_norm, "attn_sub_norm", il), "attn_out", il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        y = ops.swiglu(b.linear(w.ffn_gate, y, "ffn_gate", il), b.linear(w.ffn_up, y, "ffn_up", il))
        y = b.linear(w.ffn_down, b.norm(y, w.ffn_sub_norm, "ffn_sub_norm", il), "ffn_down", il)
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
