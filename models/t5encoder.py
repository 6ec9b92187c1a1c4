"""t5encoder: the encoder of T5 alone; distances instead of positions, scores that nothing divides."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.weights import Group, Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    return HParams.read(kv, cache=False, head=False, f_attention_scale=1.0)


def weights(t: Weights) -> None:
    hp = t.hp
    t("token_embd", hp.n_embd, hp.n_vocab)
    t.norm("enc.output_norm")
    t.unused("output.weight")
    t.blk = [Group(t, f"enc.blk.{il}.") for il in range(hp.n_layer)]
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        w.qkv(il, bias=False)
        w("attn_o", hp.n_embd_v_gqa(il), hp.n_embd)
        w("attn_rel_b", hp.n_head[il], hp.keys.number("attention.relative_buckets_count"), optional=il > 0)
        w.ffn(il, bias=False, gate=None)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        y = b.attn(w.attn_o, q, k, v, il, seen=b.distances(w.attn_rel_b or b.w.blk[0].attn_rel_b))
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.ffn(w, b.norm(x, w.ffn_norm, "ffn_norm", il), il, act="gelu" if w.ffn_gate else "relu")
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(b.norm(x, b.w.enc_output_norm, "result_norm"), norm=False)
