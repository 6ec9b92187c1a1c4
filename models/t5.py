"""t5: an encoder and a decoder, which attends to what the encoder made of the text; distances instead of positions."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.tensor import Tensor
from ggraph.weights import Group, Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    encoder = HParams.read(kv, cache=False, head=False, causal=False, f_attention_scale=1.0)
    n = int(encoder.keys.number("decoder_block_count", encoder.n_layer))
    per_layer = {name: getattr(encoder, name)[:1] * n for name in ("n_head", "n_head_kv", "n_ff", "n_expert_used", "n_ff_exp")}
    start = int(encoder.keys.number("decoder_start_token_id", -1))
    return encoder.replace(encoder=encoder, decoder_start=start, cache=True, head=True, causal=True, n_layer=n, **per_layer)


def weights(t: Weights) -> None:
    t.embeddings(norm=False)
    t.norm("enc.output_norm", "dec.output_norm")
    assert t.hp.encoder is not None
    t.enc = [Group(t, f"enc.blk.{il}.") for il in range(t.hp.encoder.n_layer)]
    t.blk = [Group(t, f"dec.blk.{il}.") for il in range(t.hp.n_layer)]
    for layers in (t.enc, t.blk):
        for il, w in enumerate(layers):
            _layer(t.hp, w, first=il == 0)
    for w in t.blk:
        w.norm("cross_attn_norm")
        w("cross_attn_q", t.hp.n_embd, t.hp.n_embd_head_k * t.hp.n_head[0])
        w("cross_attn_k", t.hp.n_embd, t.hp.n_embd_k_gqa(0))
        w("cross_attn_v", t.hp.n_embd, t.hp.n_embd_v_gqa(0))
        w("cross_attn_o", t.hp.n_embd_head_v * t.hp.n_head[0], t.hp.n_embd)
        w.unused("cross_attn_rel_b.weight")


def _layer(hp: HParams, w: Group, first: bool) -> None:
    w.norm("attn_norm", "ffn_norm")
    w.qkv(0, bias=False)
    w("attn_o", hp.n_embd_head_v * hp.n_head[0], hp.n_embd)
    w("attn_rel_b", hp.n_head[0], hp.keys.number("attention.relative_buckets_count"), optional=not first)
    w.ffn(0, bias=False, gate=None)


def encoder_graph(b: Builder) -> None:
    """The hidden states of the text."""
    x = b.inp_embd()
    seen: Tensor | None = None
    for il, w in enumerate(b.w.enc):
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        seen = seen if w.attn_rel_b is None else b.distances(w.attn_rel_b)
        x = b.residual(x, b.attn(w.attn_o, q, k, v, il, seen=seen), "ffn_inp", il)
        x = _ffn(b, w, x, il)
    b.finish(b.norm(x, b.w.enc_output_norm, "result_norm"), norm=False)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    seen: Tensor | None = None
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        seen = seen if w.attn_rel_b is None else b.distances(w.attn_rel_b)
        x = b.residual(x, b.attn(w.attn_o, q, k, v, il, seen=seen), "cross_inp", il)
        y = b.cross_attn(w, b.norm(x, w.cross_attn_norm, "attn_norm_cross", il), il)
        y, x = b.out_ids(il, y, x)
        x = _ffn(b, w, b.residual(x, y, "ffn_inp", il), il)
    b.finish(b.norm(x, b.w.dec_output_norm, "result_norm"), norm=False)


def _ffn(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    y = b.ffn(w, b.norm(x, w.ffn_norm, "ffn_norm", il), il, act="gelu" if w.ffn_gate else "relu")
    return b.layer_out(b.residual(x, y, "ffn_out", il), il)
