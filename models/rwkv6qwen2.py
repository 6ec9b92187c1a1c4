"""rwkv6qwen2: QRWKV 6; Qwen 2.5 whose attention is RWKV 6's time mixing, as gated linear attention without a bonus."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph import ops
from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.tensor import Tensor
from ggraph.weights import Group, Weights

from .rwkv6 import decays, head_size, mix_weights, mixtures
from .rwkv6 import hparams as rwkv_hparams


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = rwkv_hparams(kv)
    return hp.replace(n_embd_r=hp.n_embd)                                         # the feed-forward looks at one token


def weights(t: Weights) -> None:
    hp, n, d = t.hp, t.hp.n_embd, head_size(t.hp)
    t.embeddings(norm_bias=None, output=True)
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        mix_weights(hp, w)
        n_kv = d * (hp.n_head_kv[il] or n // d)
        w("time_mix_key", n, n_kv, bias=None)
        w("time_mix_value", n, n_kv, bias=None)
        w("time_mix_receptance", n, n, bias=None)
        w("time_mix_gate", n, n)
        w("time_mix_output", n, n)
        w.ffn(il, bias=False)


def time_mix(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    d = head_size(b.hp)
    n_head = x.ne[0] // d
    xw, xk, xv, xr, xg = mixtures(b, w, x, ops.sub(b.shifted(x, il, 0), x))
    r = ops.reshape(b.linear(w.time_mix_receptance, xr), (d, n_head, b.n_tokens))
    k, v = (_repeated(ops.reshape(y, (d, y.ne[0] // d, b.n_tokens)), n_head)
            for y in (b.linear(w.time_mix_key, xk), b.linear(w.time_mix_value, xv)))
    decay = decays(b, w, xw, d)
    k = ops.sub(k, ops.mul(k, decay))
    y = b.recurrence(lambda state: ops.gated_linear_attn(k, v, r, decay, state, d ** -0.5), v, il)
    y = ops.mul(ops.reshape(y, x.ne[:2]), ops.sigmoid(b.linear(w.time_mix_gate, xg)))
    return b.linear(w.time_mix_output, y, "time_mix_out", il)


def _repeated(x: Tensor, n_head: int) -> Tensor:
    """[d, n, n_tokens] -> [d, n_head, n_tokens], each head as often as needed, side by side"""
    d, n, n_tokens = x.ne[:3]
    one = ops.reshape(x, (d, 1, n, n_tokens))
    return ops.reshape(ops.repeat(one, (d, n_head // n, n, n_tokens)), (d, n_head, n_tokens))


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = time_mix(b, w, b.norm(x, w.attn_norm, "attn_norm", il), il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        x = b.layer_out(b.residual(x, b.ffn(w, b.norm(x, w.ffn_norm, "ffn_norm", il), il), "ffn_out", il), il)
    b.finish(x)
