"""eurobert: EuroBERT; a Llama whose tokens all see each other, without an output head."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    return HParams.read(kv, rope_mode=NEOX, cache=False, head=False)


def weights(t: Weights) -> None:
    t("token_embd", t.hp.n_embd, t.hp.n_vocab)
    t.norm("output_norm")
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        w.qkv(il)
        w.attn_out(il, bias=False)
        w.ffn(il, bias=False)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.ffn(w, b.norm(x, w.ffn_norm, "ffn_norm", il), il)
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
