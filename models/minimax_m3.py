"""minimax-m3: MiniMax M3; layers with experts attend to chosen blocks (MSA), Q and K normed per head, gpt-oss's activation."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.errors import ModelError
from ggraph.hparams import HParams, Indexer
from ggraph.ops import NEOX
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX)
    n_head, head, block, top_k, local = (int(hp.keys.number(f"attention.indexer.{name}")) for name in
                                         ("head_count", "key_length", "block_size", "top_k", "local_blocks"))
    if min(n_head, head, block, top_k) < 1 or local < 0:
        raise ModelError(f"{hp.arch}.attention.indexer: {n_head} heads of {head} elements cannot choose {top_k} blocks of {block}")
    layers = tuple(il >= hp.n_layer_dense_lead for il in range(hp.n_layer))
    return hp.replace(indexer=Indexer(layers, n_head, head, block, top_k, local))


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings()
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        w.norm("attn_q_norm", "attn_k_norm", n=hp.n_embd_head_k)
        w.qkv(il)
        w.attn_out(il)
        if il < hp.n_layer_dense_lead:
            w.ffn(il)
        else:
            w.experts(il, probs_bias=True)
            w.ffn(il, n_ff=hp.n_ff_exp[il] * hp.n_expert_shared, suffix="_shexp")
            w.indexer()


def graph(b: Builder) -> None:
    hp = b.hp
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        q, k = b.qk_norm(w, q, k, il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il, seen=b.choose_blocks(w, y, il))
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        dense = il < hp.n_layer_dense_lead
        y = b.ffn(w, y, il, act="swiglu_oai") if dense else b.moe_and_shared(w, y, il, act="swiglu_oai")
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
