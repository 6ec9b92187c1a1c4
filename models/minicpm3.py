"""minicpm3: MiniCPM 3; latent attention whose K and V are made from the latent vectors, LongRoPE, scales that are constants."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX)
    return hp.replace(f_embedding_scale=12.0, f_residual_scale=1.4 / hp.n_layer ** 0.5)


def weights(t: Weights) -> None:
    t.embeddings()
    t.rope_factors()
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        w.mla(il)
        w.ffn(il)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        y = b.mla(w, y, il, b.hp.kq_scale)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        x = b.layer_out(b.residual(x, b.ffn(w, y, il), "ffn_out", il), il)
    x = b.norm(x, b.w.output_norm, "result_norm")
    b.finish(b.scale(x, 256.0 / b.hp.n_embd, "lmhead_scaling"), norm=False)
