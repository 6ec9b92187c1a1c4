"""rwkv7: RWKV 7 (Goose); as RWKV 6, with a state that is also corrected along a direction, and values mixed with the first."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph import ops
from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.tensor import Tensor
from ggraph.weights import Group, Weights

from .rwkv6 import head_size, lerp, norm_heads
from .rwkv6 import hparams as rwkv_hparams

MIXED = "rwkvag"                                        # receptance, decay, key, value, rate, gate


def hparams(kv: Mapping[str, Any]) -> HParams:
    return rwkv_hparams(kv)


def weights(t: Weights) -> None:
    hp, n = t.hp, t.hp.n_embd
    t.embeddings(norm_bias=True, output=True)
    t.norm("token_embd_norm", bias=True)
    for il, w in t.layers():
        w.norm("attn_norm", "attn_norm_2", "time_mix_ln", bias=True)
        mix_weights(hp, il, w)
        w.norm("channel_mix_lerp_k")
        w("channel_mix_key", n, hp.n_ff[0])
        w("channel_mix_value", hp.n_ff[0], n)


def mix_weights(hp: HParams, il: int, w: Group, gated: bool = True) -> None:
    n = hp.n_embd
    ranks = [("w", "decay"), ("a", "iclr"), ("v", "value_residual_mix"), ("g", "gate")]
    w("time_mix_lerp_fused", n, 1, 1, len(MIXED) - (not gated))
    for name, key in ranks if gated else ranks[:3]:
        if name == "v" and il == 0:
            w.unused(*(f"time_mix_v{i}.weight" for i in range(3)))                # there is nothing to mix with yet
            continue
        rank = int(hp.keys.number(f"attention.{key}_lora_rank"))
        if name != "g":
            w(f"time_mix_{name}0", n)
        w(f"time_mix_{name}1", n, rank)
        w(f"time_mix_{name}2", rank, n)
    for name in ("k_k", "k_a", "r_k"):
        w("time_mix_" + name, n)
    for name in ("key", "value", "receptance", "output"):
        w("time_mix_" + name, n, n)


def mixtures(w: Group, x: Tensor, step: Tensor) -> list[Tensor]:
    p = w.time_mix_lerp_fused.weight
    return [ops.add(ops.mul(step, ops.view(p, x.ne[:1], (), i * p.nb[3])), x) for i in range(p.ne[3])]


def time_mix(b: Builder, w: Group, x: Tensor, il: int, v_first: Tensor | None) -> tuple[Tensor, Tensor]:
    """(result, the values before they are mixed)"""
    d = head_size(b.hp)
    shape = (d, x.ne[0] // d, b.n_tokens)
    xr, xw, xk, xv, xa, *xg = mixtures(w, x, ops.sub(b.shifted(x, il, 0), x))
    r, k, own = b.linear(w.time_mix_receptance, xr), b.linear(w.time_mix_key, xk), b.linear(w.time_mix_value, xv)
    decay = ops.add(b.mm(w.time_mix_w2, ops.tanh(b.mm(w.time_mix_w1, xw))), w.time_mix_w0.weight)
    decay = ops.exp(ops.scale(ops.sigmoid(decay), -0.606531))
    rate = ops.sigmoid(ops.add(b.mm(w.time_mix_a2, b.mm(w.time_mix_a1, xa)), w.time_mix_a0.weight))
    v = own
    if v_first is not None:
        part = ops.sigmoid(ops.add(b.mm(w.time_mix_v2, b.mm(w.time_mix_v1, xv)), w.time_mix_v0.weight))
        v = ops.add(own, ops.mul(ops.sub(v_first, own), part))
    direction = ops.l2_norm(ops.reshape(ops.mul(k, w.time_mix_k_k.weight), shape), 1e-12)
    scaled = ops.mul(k, w.time_mix_k_a.weight)
    k = ops.add(k, ops.sub(ops.mul(rate, scaled), scaled))
    r, decay, k, v, rate = (ops.reshape(y, shape) for y in (r, decay, k, v, rate))
    y = b.recurrence(lambda state: ops.rwkv_wkv7(r, decay, k, v, ops.neg(direction), ops.mul(direction, rate), state), v, il)
    y = norm_heads(y, w.time_mix_ln) if w.time_mix_ln and w.time_mix_ln.bias else ops.reshape(y, x.ne[:2])
    bonus = ops.sum_rows(ops.mul(ops.mul(k, r), ops.reshape(w.time_mix_r_k.weight, shape[:2])))
    y = ops.add(y, ops.reshape(ops.mul(v, bonus), x.ne[:2]))
    if xg:
        y = ops.mul(y, b.mm(w.time_mix_g2, ops.sigmoid(b.mm(w.time_mix_g1, xg[0]))))
    return b.linear(w.time_mix_output, y, "time_mix_out", il), own


def channel_mix(b: Builder, w: Group, x: Tensor, step: Tensor, il: int) -> Tensor:
    k = ops.sqr(ops.relu(b.linear(w.channel_mix_key, lerp(x, step, w.channel_mix_lerp_k))))
    return b.linear(w.channel_mix_value, k, "channel_mix_out", il)


def graph(b: Builder) -> None:
    v_first: Tensor | None = None
    x = b.layer_norm(b.inp_embd(), b.w.token_embd_norm, "inp_norm")
    for il, w in b.layers():
        y, v = time_mix(b, w, b.layer_norm(x, w.attn_norm, "attn_norm", il), il, v_first)
        v_first = v if v_first is None else v_first
        x = b.residual(x, y, "ffn_inp", il)
        y = b.layer_norm(x, w.attn_norm_2, "ffn_norm", il)
        x, y, step = b.out_ids(il, x, y, ops.sub(b.shifted(y, il, 1), y))
        x = b.layer_out(b.residual(x, channel_mix(b, w, y, step, il), "ffn_out", il), il)
    b.finish(b.layer_norm(x, b.w.output_norm, "result_norm"), norm=False)
