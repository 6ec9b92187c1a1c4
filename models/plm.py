"""plm: PLM 1.8B; latent attention whose K and V are made from the latent vectors, a feed-forward of squared ReLU without a gate."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NORMAL
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    return HParams.read(kv, rope_mode=NORMAL).replace(n_lora_q=0, is_mla=False)


def weights(t: Weights) -> None:
    t.embeddings()
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        w.mla(il)
        w.ffn(il, bias=False, gate=False)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        y = b.mla(w, y, il, b.hp.kq_scale)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.ffn(w, b.norm(x, w.ffn_norm, "ffn_norm", il), il, act="relu_sqr")
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
