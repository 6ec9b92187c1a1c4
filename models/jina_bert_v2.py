"""jina-bert-v2: Jina's BERT; distances instead of positions (ALiBi), norms after both blocks, some files with a norm more."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    return HParams.read(kv, cache=False, head=False, f_max_alibi_bias=8.0, f_norm_rms_eps=0.0)


def weights(t: Weights) -> None:
    hp = t.hp
    t.encoder(token_types=True, n_cls=1)
    for il, w in t.layers():
        w.norm("attn_q_norm", "attn_k_norm", bias=None, optional=True)
        w.qkv(il)
        w.attn_out(il, bias=True)
        w.norm("attn_output_norm", "layer_output_norm", bias=True)
        w.norm("attn_norm_2", bias=None, optional=True)
        w("ffn_gate", hp.n_embd, hp.n_ff[il], optional=True)
        merged = w.shape("ffn_up.weight")[1:] == (2 * hp.n_ff[il],)
        w("ffn_up", hp.n_embd, hp.n_ff[il] * (2 if merged else 1), bias=None)
        w("ffn_down", hp.n_ff[il], hp.n_embd, bias=True)


def graph(b: Builder) -> None:
    x = b.norm(b.add_token_type(b.inp_embd()), b.w.token_embd_norm, "inp_norm")
    for il, w in b.layers():
        q, k, v = b.qkv(w, x, il)
        q, k = b.qk_norm(w, q, k, il, whole=True)
        y = b.attn(w.attn_output, q, k, v, il)
        y, x = b.out_ids(il, y, x)
        y = b.norm(b.residual(x, y, "attn_residual", il), w.attn_output_norm, "attn_out_norm", il)
        x = b.norm(b.residual(x, y, "attn_residual_2", il), w.attn_norm_2, "ffn_inp", il) if w.attn_norm_2 else y
        y = b.residual(x, b.ffn(w, x, il, act="gelu"), "ffn_residual", il)
        x = b.norm(y, w.layer_output_norm, "l_out", il)
    b.finish(x, norm=False)
