"""minimax-m3: MiniMax M3; layers with experts attend to chosen blocks (MSA), Q and K normed per head, gpt-oss's activation."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.errors import ModelError
from ggraph.hparams import HParams, Indexer
from ggraph.ops import NEOX
from ggraph.weights import Group, Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX)
    n_head, head, block, top_k, local = (int(hp.keys.number(f"attention.indexer.{name}")) for name in
                                         ("head_count", "key_length", "block_size", "top_k", "local_blocks"))
    if min(n_head, head, block, top_k) < 1 or local < 0:
        raise ModelError(f"{hp.arch}.attention.indexer: {n_head} heads of {head} elements cannot choose {top_k} blocks of {block}")
    return hp.replace(indexer=Indexer(hp.n_layer_dense_lead, n_head, head, block, top_k, local))


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
            indexer_weights(hp, w)


def indexer_weights(hp: HParams, w: Group) -> None:
    assert hp.indexer is not None
    w("indexer.q_proj", hp.n_embd, hp.indexer.head * hp.indexer.n_head)
    w("indexer.k_proj", hp.n_embd, hp.indexer.head)
    w.norm("indexer.q_norm", "indexer.k_norm", n=hp.indexer.head)


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
