"""command-r: Command R and R+; attention and feed-forward side by side, in R+ with norms of Q and K."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NORMAL
from ggraph.weights import Weights

N_LAYER_PLUS = 64


def hparams(kv: Mapping[str, Any]) -> HParams:
    return HParams.read(kv, "logit_scale", rope_mode=NORMAL, f_norm_rms_eps=0.0)


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings()
    for il, w in t.layers():
        w.norm("attn_norm")
        if hp.n_layer >= N_LAYER_PLUS:
            w("attn_q_norm", hp.n_embd_head_k, hp.n_head[il])
            w("attn_k_norm", hp.n_embd_head_k, hp.n_head_kv[il])
        w.qkv(il)
        w.attn_out(il)
        w.ffn(il)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        if b.hp.n_layer >= N_LAYER_PLUS:
            q, k = b.qk_norm(w, q, k, il)
        attn = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        attn, x, y = b.out_ids(il, attn, x, y)
        x = b.residual(x, b.ffn(w, y, il), "ffn_out", il)
        x = b.layer_out(b.residual(x, attn, "attn_residual", il), il)
    b.finish(x)
