"""arwkv7: ARWKV 7; Qwen 2.5 whose attention is RWKV 7's time mixing, in some files without its gate and its norm."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.tensor import Tensor
from ggraph.weights import Weights

from .rwkv6qwen2 import hparams as qwen_hparams
from .rwkv7 import MIXED, mix_weights, time_mix


def hparams(kv: Mapping[str, Any]) -> HParams:
    return qwen_hparams(kv)


def weights(t: Weights) -> None:
    t.embeddings(output=True)
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        w.norm("time_mix_ln", bias=None, optional=True)
        mix_weights(t.hp, il, w, gated=w.shape("time_mix_lerp_fused.weight")[-1:] == (len(MIXED),))
        w.ffn(il, bias=False)


def graph(b: Builder) -> None:
    v_first: Tensor | None = None
    x = b.inp_embd()
    for il, w in b.layers():
        y, v = time_mix(b, w, b.norm(x, w.attn_norm, "attn_norm", il), il, v_first)
        v_first = v if v_first is None else v_first
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        x = b.layer_out(b.residual(x, b.ffn(w, b.norm(x, w.ffn_norm, "ffn_norm", il), il), "ffn_out", il), il)
    b.finish(x)
