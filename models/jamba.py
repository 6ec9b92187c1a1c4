"""jamba: Jamba; layers of Mamba 1 and of attention without positions, each followed by a feed-forward, dense or with experts."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv)
    return hp.recurrent(hp.layers_without_kv())


def weights(t: Weights) -> None:
    t.embeddings()
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        if t.hp.is_recurrent(il):
            w.mamba(norms=True)
        else:
            w.qkv(il)
            w.attn_out(il, bias=False)
        if f"blk.{il}.ffn_gate_inp.weight" in t.file.tensors:
            w.experts(il, n_ff=t.hp.n_ff[il])
        else:
            w.ffn(il)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        if b.hp.is_recurrent(il):
            y = b.mamba(w, y, il)
        else:
            y = b.attn(w.attn_output, *b.qkv(w, y, il), il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        routed = "ffn_gate_inp" in vars(w)
        y = b.moe(w, y, il, norm_w=False) if routed else b.ffn(w, y, il)
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
