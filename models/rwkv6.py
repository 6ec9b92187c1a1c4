"""rwkv6: RWKV 6 (Finch); no attention: each layer mixes a token with the one before, and in time through a decaying state."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph import ops
from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.tensor import Tensor
from ggraph.weights import Group, Param, Weights

MIXED = "wkvrg"                                         # what the five mixtures feed: decay, key, value, receptance, gate


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv)
    return hp.recurrent((True,) * hp.n_layer, n_embd_r=2 * hp.n_embd, n_embd_s=hp.n_embd * head_size(hp))


def head_size(hp: HParams) -> int:
    return int(hp.keys.number("wkv.head_size"))


def weights(t: Weights) -> None:
    hp, n = t.hp, t.hp.n_embd
    t.embeddings(norm_bias=True, output=True)
    t.norm("token_embd_norm", bias=True)
    for _, w in t.layers():
        w.norm("attn_norm", "attn_norm_2", "time_mix_ln", bias=True)
        mix_weights(hp, w)
        w.norm("channel_mix_lerp_k", "channel_mix_lerp_r")
        w("time_mix_first", head_size(hp), n // head_size(hp))
        for name in ("key", "value", "receptance", "gate", "output"):
            w("time_mix_" + name, n, n)
        w("channel_mix_key", n, hp.n_ff[0])
        w("channel_mix_value", hp.n_ff[0], n)
        w("channel_mix_receptance", n, n)


def mix_weights(hp: HParams, w: Group) -> None:
    """How a token is mixed with the one before it, and what its decays are made from."""
    n = hp.n_embd
    n_mix, n_decay = (int(hp.keys.number(name)) for name in ("time_mix_extra_dim", "time_decay_extra_dim"))
    w("time_mix_w1", n, 5 * n_mix)
    w("time_mix_w2", n_mix, n, 5)
    fused = w("time_mix_lerp_fused", n, 1, 1, 5, optional=True)
    for name in MIXED:
        w("time_mix_lerp_" + name, n, optional=fused is not None)
    w.norm("time_mix_lerp_x")
    w("time_mix_decay", n)
    w("time_mix_decay_w1", n, n_decay)
    w("time_mix_decay_w2", n_decay, n)


def lerp(x: Tensor, step: Tensor, p: Param) -> Tensor:
    """x moved towards the token before it, which is `step` away."""
    return ops.add(ops.mul(step, ops.reshape(p.weight, (x.ne[0],))), x)


def mixtures(b: Builder, w: Group, x: Tensor, step: Tensor) -> list[Tensor]:
    """Five mixtures of each token with the one before it, in parts that depend on both."""
    n, n_mix, n_tokens = x.ne[0], w.time_mix_w2.weight.ne[0], b.n_tokens
    y = ops.tanh(b.mm(w.time_mix_w1, lerp(x, step, w.time_mix_lerp_x)))
    y = ops.cont(ops.permute(ops.reshape(y, (n_mix, 5, n_tokens)), (0, 2, 1, 3)))
    y = b.mm(w.time_mix_w2, y)                                                    # [n_embd, n_tokens, 5]
    out = []
    for i, name in enumerate(MIXED):
        fused: Param | None = w.time_mix_lerp_fused
        p = getattr(w, "time_mix_lerp_" + name).weight if fused is None else fused.weight
        fixed = ops.reshape(p, (n,)) if fused is None else ops.view(p, (n,), (), i * p.nb[3])
        part = ops.view(y, (n, n_tokens), (y.nb[1],), i * y.nb[2])
        out.append(ops.add(ops.mul(ops.add(part, fixed), step), x))
    return out


def time_mix(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    d = head_size(b.hp)
    shape = (d, x.ne[0] // d, b.n_tokens)
    xw, xk, xv, xr, xg = mixtures(b, w, x, ops.sub(b.shifted(x, il, 0), x))
    r, k, v = (ops.reshape(b.linear(p, y), shape) for p, y in
               ((w.time_mix_receptance, xr), (w.time_mix_key, xk), (w.time_mix_value, xv)))
    decay = decays(b, w, xw, d)
    y = b.recurrence(lambda state: ops.rwkv_wkv6(k, v, r, w.time_mix_first.weight, decay, state), v, il)
    y = norm_heads(y, w.time_mix_ln)
    return b.linear(w.time_mix_output, ops.mul(y, ops.silu(b.linear(w.time_mix_gate, xg))), "time_mix_out", il)


def decays(b: Builder, w: Group, x: Tensor, d: int) -> Tensor:
    """The factors of each channel, by heads [d, n_head, n_tokens]."""
    y = ops.add(b.mm(w.time_mix_decay_w2, ops.tanh(b.mm(w.time_mix_decay_w1, x))), w.time_mix_decay.weight)
    return ops.reshape(ops.exp(ops.neg(ops.exp(y))), (d, x.ne[0] // d, b.n_tokens))


def norm_heads(y: Tensor, p: Param) -> Tensor:
    """[d, n_head, n_tokens] normed head by head, then scaled and shifted as one [d n_head, n_tokens]."""
    assert p.bias is not None
    flat = ops.reshape(ops.norm(y, 64e-5), (y.ne[0] * y.ne[1], y.ne[2]))
    return ops.add(ops.mul(flat, p.weight), p.bias)


def channel_mix(b: Builder, w: Group, x: Tensor, step: Tensor, il: int) -> Tensor:
    r = ops.sigmoid(b.linear(w.channel_mix_receptance, lerp(x, step, w.channel_mix_lerp_r)))
    k = ops.sqr(ops.relu(b.linear(w.channel_mix_key, lerp(x, step, w.channel_mix_lerp_k))))
    return b.cb(ops.mul(r, b.linear(w.channel_mix_value, k)), "channel_mix_out", il)


def graph(b: Builder) -> None:
    every = int(b.hp.keys("rescale_every_n_layers", 0))
    x = b.layer_norm(b.inp_embd(), b.w.token_embd_norm, "inp_norm")
    for il, w in b.layers():
        y = time_mix(b, w, b.layer_norm(x, w.attn_norm, "attn_norm", il), il)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.layer_norm(x, w.attn_norm_2, "ffn_norm", il)
        x, y, step = b.out_ids(il, x, y, ops.sub(b.shifted(y, il, 1), y))
        x = b.residual(x, channel_mix(b, w, y, step, il), "ffn_out", il)
        x = b.layer_out(ops.scale(x, 0.5) if every and (il + 1) % every == 0 else x, il)
    b.finish(b.layer_norm(x, b.w.output_norm, "result_norm"), norm=False)
