"""minimax-m3: MiniMax M3; experts beside a shared one with gpt-oss's activation, Q and K normed per head, partial rotation.

Attention is dense, as llama.cpp's is without flash attention: the selection of blocks by an indexer (MSA) is not built, and its
tensors are not read. Where the two can differ, a context that asks for flash attention is refused.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.errors import ModelError
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    return HParams.read(kv, rope_mode=NEOX)


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
            w.unused(*(f"indexer.{name}.weight" for name in ("q_proj", "k_proj", "q_norm", "k_norm")))


def check_blocks(b: Builder) -> None:
    """Up to so many tokens the choice of blocks leaves none out."""
    n = int(b.hp.keys.number("attention.indexer.top_k")) * int(b.hp.keys.number("attention.indexer.block_size"))
    if b.cp.flash_attn and b.cp.n_ctx_seq > n:
        raise ModelError(f"{b.hp.arch} chooses blocks to attend to beyond {n} tokens, which is not supported: give an n_ctx of at "
                         f"most {n} for each sequence, or flash_attn=\"off\" to attend to all blocks")


def graph(b: Builder) -> None:
    check_blocks(b)
    hp = b.hp
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        q, k = b.qk_norm(w, q, k, il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        dense = il < hp.n_layer_dense_lead
        y = b.ffn(w, y, il, act="swiglu_oai") if dense else b.moe_and_shared(w, y, il, act="swiglu_oai")
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
