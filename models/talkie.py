"""talkie: Talkie; norms without weights, Q scaled per head, the embedding added to every layer's result."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph import ops
from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    return HParams.read(kv, "logit_scale", rope_mode=NEOX)


def weights(t: Weights) -> None:
    t.embeddings(norm=False)
    for il, w in t.layers():
        w("attn_q_norm", 1, t.hp.n_head[il])
        w.qkv(il)
        w.attn_out(il)
        w.ffn(il)
        w("layer_output_scale", 1)


def graph(b: Builder) -> None:
    x = skip = b.norm(b.inp_embd(), None, "inp_norm")
    for il, w in b.layers():
        y = b.norm(x, None, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        q = b.norm(b.rope(q, il), w.attn_q_norm, "Qcur_norm", il)
        k = b.norm(b.rope(k, il), None, "Kcur_norm", il)
        y = b.attn(w.attn_output, q, k, v, il)
        y, x, skip = b.out_ids(il, y, x, skip)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, None, "ffn_norm", il)
        x = ops.add(b.ffn(w, y, il), x)
        x = b.layer_out(ops.add(x, b.cb(ops.mul(skip, w.layer_output_scale.weight), "embd_skip", il)), il)
    b.finish(b.norm(x, None, "result_norm"), norm=False)
