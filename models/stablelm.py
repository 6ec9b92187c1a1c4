"""stablelm: StableLM; layer norms, in the 12B Q and K normed with weights of each head and both blocks side by side."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    return HParams.read(kv, rope_mode=NEOX, f_norm_rms_eps=0.0)


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings(norm_bias=True)
    for il, w in t.layers():
        w.norm("attn_norm", bias=True)
        w("attn_q_norm", hp.n_embd_head_k, hp.n_head[il], optional=True)
        w("attn_k_norm", hp.n_embd_head_k, hp.n_head_kv[il], optional=True)
        w.norm("ffn_norm", bias=None, optional=True)
        w.qkv(il)
        w.attn_out(il)
        w.ffn(il)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        n = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, n, il)
        if w.attn_q_norm:
            q = b.norm(q, w.attn_q_norm, "Qcur", il)
        if w.attn_k_norm:
            k = b.norm(k, w.attn_k_norm, "Kcur", il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, n, x = b.out_ids(il, y, n, x)
        x = b.residual(x, y, "ffn_inp", il)
        if w.ffn_norm:
            n = b.norm(x, w.ffn_norm, "ffn_norm", il)
        x = b.layer_out(b.residual(x, b.ffn(w, n, il), "ffn_out", il), il)
    b.finish(x)
