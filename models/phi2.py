"""phi2: Phi 1, 1.5 and 2; attention and feed-forward side by side on one layer norm, biases everywhere."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph import ops
from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    return HParams.read(kv, rope_mode=NEOX, f_norm_rms_eps=0.0)


def weights(t: Weights) -> None:
    t.embeddings(norm_bias=True, output_bias=True)
    for il, w in t.layers():
        w.norm("attn_norm", bias=True)
        w.qkv(il)
        w.attn_out(il, bias=True)
        w.ffn(il, bias=True, gate=False)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        n = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, n, il)
        q = b.scale(b.rope(q, il), b.hp.kq_scale, "Qcur", il)        # before it meets K, where it is rounded
        y = b.attn(w.attn_output, q, b.rope(k, il), v, il, scale=1.0)
        y, n, x = b.out_ids(il, y, n, x)
        y = ops.add(y, b.ffn(w, n, il, act="gelu"))
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
