"""plamo: PLaMo 1; attention and feed-forward side by side on one norm, the whole head rotated."""
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
    return hp.replace(n_rot=hp.n_embd_head_k)


def weights(t: Weights) -> None:
    t.embeddings()
    for il, w in t.layers():
        w.norm("attn_norm")
        w.qkv(il)
        w.attn_out(il)
        w.ffn(il)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        n = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, n, il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, n, x = b.out_ids(il, y, n, x)
        y = ops.add(y, b.ffn(w, n, il))
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
