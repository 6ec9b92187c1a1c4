"""phi3: Phi 3 and 3.5 mini, Phi 4; one matrix for Q, K, V and one for gate and up, LongRoPE."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    return HParams.read(kv, rope_mode=NEOX)          # llama.cpp leaves the window of these files out, and so do we


def weights(t: Weights) -> None:
    t.embeddings()
    t.rope_factors()
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        w.qkv(il)
        w.attn_out(il, bias=False)
        w("ffn_up", t.hp.n_embd, 2 * t.hp.n_ff[il])
        w("ffn_down", t.hp.n_ff[il], t.hp.n_embd)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        q = b.scale(b.rope(q, il), b.hp.kq_scale, "Qcur", il)        # before it meets K, where it is rounded
        y = b.attn(w.attn_output, q, b.rope(k, il), v, il, scale=1.0)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        x = b.layer_out(b.residual(x, b.ffn(w, y, il), "ffn_out", il), il)
    b.finish(x)
