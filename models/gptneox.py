"""gptneox: GPT-NeoX and Pythia; layer norms, biases everywhere, blocks side by side or one after the other."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    return HParams.read(kv, rope_mode=NEOX, f_norm_rms_eps=0.0)


def weights(t: Weights) -> None:
    t.embeddings(norm_bias=True)
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm", bias=True)
        w.qkv(il, bias=True)
        w.attn_out(il, bias=True)
        w.ffn(il, bias=True, gate=False)


def graph(b: Builder) -> None:
    parallel = bool(b.hp.keys("use_parallel_residual"))
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        attn = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        attn, x = b.out_ids(il, attn, x)
        both = b.residual(x, attn, "ffn_inp", il)
        y = b.norm(x if parallel else both, w.ffn_norm, "ffn_norm", il)
        x = b.layer_out(b.residual(both, b.ffn(w, y, il, act="gelu"), "ffn_out", il), il)
    b.finish(x)
