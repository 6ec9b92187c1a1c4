"""cogvlm: CogVLM, text; the second set of weights, for images, is not used."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.errors import ModelError
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    return HParams.read(kv, rope_mode=NEOX, rope_freq_base=10000.0, rope_scaling="none")


def weights(t: Weights) -> None:
    t.embeddings()
    t.unused("rope_freqs.weight")
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        w.qkv(il, bias=False)
        w.attn_out(il, bias=False)
        w.ffn(il, bias=False)
        w.unused(*(f"vis_{name}.weight" for name in ("attn_qkv", "attn_output", "gate", "up", "down")))


def graph(b: Builder) -> None:
    if b.embd:
        raise ModelError("cogvlm takes vectors for images, and images are not supported; give token ids")
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        x = b.layer_out(b.residual(x, b.ffn(w, y, il), "ffn_out", il), il)
    b.finish(x)
