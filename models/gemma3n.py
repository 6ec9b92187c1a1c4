"""gemma3n: Gemma 3n, text; several residual streams (AltUp), a low-rank path beside attention (Laurel), embeddings of each layer.

The sizes of all that are not in the file: as in llama.cpp they are constants.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph import ops
from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.tensor import Tensor
from ggraph.weights import Group, Param, Weights

from .gemma4 import from_own, of_layer, own_weights, per_layer, table_weights

N_STREAM, N_PER_LAYER, LAUREL_RANK = 4, 256, 64
N_LAYER_KV = 20                         # layers from here on read K and V of earlier ones
N_SPARSE, SPARSE_STD = 10, 1.6448533535003662        # leading layers that keep the largest 5% of their gates alone


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX)
    hp = hp.replace(f_attention_scale=1.0, f_final_logit_softcapping=30.0, rope_freq_scale_swa=1.0,
                    rope_freq_base_swa=float(hp.keys("rope.freq_base_swa", 10000.0)), n_layer_kv=min(N_LAYER_KV, hp.n_layer))
    return hp.window(hp.keys.number("attention.sliding_window"), hp.swa_pattern(5))


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings()
    table_weights(t, N_PER_LAYER)
    for name in ("altup_proj", "altup_unembd_proj"):
        t(name, hp.n_embd, hp.n_embd, N_STREAM - 1)
    for il, w in t.layers():
        w.norm("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "laurel_post_norm")
        w.norm("attn_q_norm", "attn_k_norm", n=hp.n_embd_head_k)
        w.qkv(il, bias=None if hp.has_kv(il) else False)
        w.unused(*(f"attn_{name}.bias" for name in ("q", "k", "v", "qkv")))          # of layers that keep no K and V
        w.attn_out(il)
        w.ffn(il)
        own_weights(hp, w, N_PER_LAYER)
        w("laurel_l", hp.n_embd, LAUREL_RANK)
        w("laurel_r", LAUREL_RANK, hp.n_embd)
        w("altup_router", hp.n_embd, N_STREAM)
        w("altup_predict_coef", N_STREAM, N_STREAM * N_STREAM)
        w("altup_correct_coef", N_STREAM, N_STREAM)
        w.norm("altup_router_norm", "altup_correct_scale")


def graph(b: Builder) -> None:
    x = b.inp_embd()
    if not b.embd:                                   # vectors that are given come scaled
        x = b.scale(x, b.hp.n_embd ** 0.5, "inp_scaled")
    own = per_layer(b, x, N_PER_LAYER)
    xs = spread(b, x)
    for il, w in b.layers():
        predicted = predict(b, w, xs, il)
        x = b.cb(stream(predicted, 0), "active_prediction", il)
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        laurel = b.norm(b.mm(w.laurel_r, b.mm(w.laurel_l, y)), w.laurel_post_norm, "laurel", il)
        laurel = b.add(laurel, y, "laurel_out", il)
        y = b.norm(attention(b, w, y, il), w.post_attention_norm, "attn_post_norm", il)
        x = b.scale(ops.add(b.add(y, x, "attn_gated", il), laurel), 2 ** -0.5, "attn_laurel", il)
        y = b.ffn(w, b.norm(x, w.ffn_norm, "ffn_norm", il), il, act=sparse if il < N_SPARSE else "gelu")
        y = b.add(b.norm(y, w.post_ffw_norm, "ffn_post_norm", il), x, "attn_ffw_laurel_gated", il)
        xs = correct(b, w, predicted, y, il)
        first = ops.mul(stream(xs, 0), w.altup_correct_scale.weight)
        first = from_own(b, w, first, of_layer(own, il), "first_prediction_out", il)
        xs = b.layer_out(ops.concat(ops.view(xs, (*xs.ne[:2], 1)), ops.add(others(xs), first), 2), il)
    x, = b.out_ids(b.hp.n_layer - 1, merge(b, xs))
    b.finish(x)


def attention(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    """V is normed; K and V come from an earlier layer where this one keeps none."""
    q, k, v = b.qkv(w, x, il)
    q = b.rope(b.norm(q, w.attn_q_norm, "Qcur_normed", il), il)
    if not b.hp.has_kv(il):
        return b.attn(w.attn_output, q, None, None, il)
    k = b.rope(b.norm(k, w.attn_k_norm, "Kcur_normed", il), il)
    return b.attn(w.attn_output, q, k, b.norm(v, None, "Vcur_normed", il), il)


def sparse(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up of those gates alone that are far above the mean of their token's."""
    centred = ops.sub(gate, ops.mean(gate))
    deviation = ops.sqrt(ops.scale(ops.sum_rows(ops.sqr(centred)), 1.0 / (gate.ne[0] - 1)))
    cutoff = ops.add(ops.mean(gate), ops.scale(deviation, SPARSE_STD))
    return ops.geglu(ops.relu(ops.sub(gate, cutoff)), up)


# --- residual streams [n_embd, n_tokens, N_STREAM], the first of which goes through the blocks

def stream(xs: Tensor, i: int) -> Tensor:
    return ops.view(xs, xs.ne[:2], xs.nb[1:2], i * xs.nb[2])


def others(xs: Tensor) -> Tensor:
    return ops.view(xs, (*xs.ne[:2], N_STREAM - 1), xs.nb[1:3], xs.nb[2])


def spread(b: Builder, x: Tensor) -> Tensor:
    """x and projections of it, as long as x."""
    more = b.mm(b.w.altup_proj, ops.repeat(x, (*x.ne[:2], N_STREAM - 1)))
    return b.cb(ops.concat(x, as_long(more, x), 2), "inp_stacked")


def merge(b: Builder, xs: Tensor) -> Tensor:
    """The mean of the first stream and projections of the others, as long as it."""
    first = stream(xs, 0)
    more = b.cb(as_long(b.mm(b.w.altup_unembd_proj, others(xs)), first), "altup_unembd")
    total = first
    for i in range(N_STREAM - 1):
        total = ops.add(total, stream(more, i))
    return b.scale(total, 1.0 / N_STREAM, "unembd_merged")


def as_long(xs: Tensor, x: Tensor) -> Tensor:
    def length(y: Tensor) -> Tensor:
        return ops.sqrt(ops.sum_rows(ops.sqr(y)))
    return ops.div(ops.mul(xs, length(x)), length(xs))


def modalities(b: Builder, w: Group, x: Tensor, coefficients: Param, name: str, il: int) -> Tensor:
    """What the router makes of x [n_embd, n_tokens], times a matrix of coefficients."""
    y = ops.scale(b.norm(x, w.altup_router_norm, "altup_router_norm", il), 1.0 / b.hp.n_embd)
    y = b.cb(ops.tanh(b.mm(w.altup_router, y)), "modalities", il)
    return b.cb(b.mm(coefficients, y), name, il)


def predict(b: Builder, w: Group, xs: Tensor, il: int) -> Tensor:
    """Each stream plus a mixture of all."""
    mix = modalities(b, w, stream(xs, 0), w.altup_predict_coef, "all_coefs", il)
    mix = ops.reshape(mix, (N_STREAM, N_STREAM, b.n_tokens))
    by_token = ops.cont(ops.permute(xs, (1, 2, 0, 3)))                              # [N_STREAM, n_embd, n_tokens]
    mixed = ops.cont(ops.permute(ops.mul_mat(by_token, mix), (0, 2, 1, 3)))
    return b.add(mixed, xs, "predictions", il)


def correct(b: Builder, w: Group, predicted: Tensor, y: Tensor, il: int) -> Tensor:
    """Each predicted stream plus as much as it takes of what the block's result y differs from the first."""
    share = ops.scale(modalities(b, w, y, w.altup_correct_coef, "all_coefs", il), 1.0, 1.0)
    share = ops.cont(ops.transpose(share), (1, b.n_tokens, N_STREAM))
    difference = b.cb(ops.sub(y, stream(predicted, 0)), "innovation", il)
    return b.add(ops.mul(ops.repeat(difference, predicted.ne), share), predicted, "corrected", il)
