"""qwen4exp: Qwen 4, experimental; Qwen 3.5's layers with experts on several residual streams (hyper-connections), and n-grams."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph import ops
from ggraph.build import Builder
from ggraph.errors import ModelError
from ggraph.hparams import HParams, Indexer, Keys, Ngrams
from ggraph.tensor import F32, Tensor
from ggraph.weights import Group, Param, Weights

from .qwen35 import delta_net, delta_net_weights, gated_attention, gated_attention_weights
from .qwen35moe import expert_weights, experts


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=ops.IMROPE)
    hp = hp.recurrent(hp.recurrent_pattern(4))
    if hc(hp) < 2:
        raise ModelError(f"{hp.arch}.hyper_connection.count is {hc(hp)}; it must be at least 2")
    hp = hp.replace(indexer=indexer(hp))
    layers = hp.keys("ple.layers", ())
    if not len(layers):
        return hp
    if len(layers) != 1 or not 0 <= layers[0] < hp.n_layer or not hp.is_recurrent(int(layers[0])):
        raise ModelError(f"{hp.arch}.ple.layers is {list(layers)}; it must name one layer with a delta net")
    history = (int(hp.keys.number("ple.conv_kernel")) - 1) * len((found := ngrams(hp.keys)).factors)
    return hp.replace(ngrams=found, ngram_layer=int(layers[0]), n_embd_p=history * hc(hp) * hp.n_embd)


def indexer(hp: HParams) -> Indexer:
    """Layers of attention with a ratio see `top_k` tokens in blocks of as many as the ratio says (QSA)."""
    ratios = [0 if hp.is_recurrent(il) else ratio for il, ratio in
              enumerate(hp.keys.per_layer("attention.compress_ratios", hp.n_layer, 0))]
    n_head, head, top_k = (int(hp.keys.number(f"attention.indexer.{name}")) for name in ("head_count", "key_length", "top_k"))
    block = max(ratios)
    if set(ratios) - {0, block} or min(n_head, head, top_k) < 1 or min(ratios) < 0 or top_k < block:
        raise ModelError(f"{hp.arch}.attention: {top_k} tokens cannot be chosen in blocks of {ratios}; all layers must have blocks "
                         "of one size, at most so large")
    return Indexer(tuple(r > 0 for r in ratios), n_head, head, max(block, 1), top_k // max(block, 1), means=True)


def ngrams(keys: Keys) -> Ngrams:
    size, heads = int(keys.number("ple.ngram_size")), int(keys.number("ple.heads_per_ngram"))
    n, eos = (size - 1) * heads, int(keys.number("ple.eos_token_id"))
    factors, offsets, rows = (tuple(int(x) for x in keys(f"ple.{name}"))[:most] for name, most in
                              (("layer_multipliers", size), ("head_offsets", n), ("head_vocab_sizes", n)))
    if size < 2 or heads < 1 or (len(factors), len(offsets), len(rows)) != (size, n, n) or min(rows) < 1:
        raise ModelError(f"{keys.arch}.ple: hashes of {size} tokens in {heads} heads need as many factors, offsets and sizes")
    if max(o + r for o, r in zip(offsets, rows)) >= 1 << 31:
        raise ModelError(f"{keys.arch}.ple: the table has too many rows")
    return Ngrams(factors, offsets, rows, eos, int(keys("ple.image_token_id", 0)) or eos)


def hc(hp: HParams) -> int:
    """The number of residual streams."""
    return int(hp.keys.number("hyper_connection.count"))


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings(norm=False)
    mixer_weights(t, t, "output_hc")
    if hp.ngrams:
        n = max(o + r for o, r in zip(hp.ngrams.offsets, hp.ngrams.rows))
        n = max((n, *t.shape("per_layer_token_embd.weight")[1:2]))                 # the end is padding
        t("per_layer_token_embd", hp.keys.number("embedding_length_per_layer_input"), n)
    for il, w in t.layers():
        for name in ("hc_attn", "hc_ffn"):
            mixer_weights(t, w, name)
            w(name + "_inject", hc(hp) * hp.n_embd, hc(hp))
        if hp.is_recurrent(il):
            delta_net_weights(hp, w)
        else:
            gated_attention_weights(hp, w, il, bias=False)
            w.unused("attn_q.bias", "attn_k.bias", "attn_v.bias")
            w.indexer()
        if il == hp.ngram_layer:
            ngram_weights(t, w)
        expert_weights(hp, w, il)


def mixer_weights(t: Weights, w: Group, name: str) -> None:
    wide, low = hc(t.hp) * t.hp.n_embd, t.hp.keys.number("hyper_connection.low_rank")
    stream_norm(t, w, name + "_norm")
    w(name + "_down", wide, low)
    w(name + "_up", low, wide)


def ngram_weights(t: Weights, w: Group) -> None:
    n, wide = t.hp.n_embd, hc(t.hp) * t.hp.n_embd
    w("ple_key", n, wide)
    w("ple_value", n, n)
    for name in ("key", "query", "conv"):
        stream_norm(t, w, "ple_norm_" + name)
    w("ple_conv1d", t.hp.keys.number("ple.conv_kernel"), wide)


def stream_norm(t: Weights, w: Group, name: str) -> None:
    """A norm of each stream; files may hold them end to end."""
    flat = len(w.shape(f"{name}.weight")) == 1
    w(name, *((hc(t.hp) * t.hp.n_embd,) if flat else (t.hp.n_embd, hc(t.hp))))


def grouped_norm(b: Builder, x: Tensor, p: Param) -> Tensor:
    """x [n_embd, hc, n] normed in each stream."""
    return ops.mul(ops.rms_norm(x, b.hp.f_norm_rms_eps), ops.reshape(p.weight, (b.hp.n_embd, hc(b.hp))))


def mix(b: Builder, w: Group, name: str, x: Tensor, il: int = -1) -> tuple[Tensor, Tensor]:
    """The streams x [n_embd, hc, n] as one [n_embd, n], each weighted by a gate; and what they were before [hc n_embd, n]."""
    n_embd, n_hc, n = x.ne[:3]
    normed = b.cb(ops.reshape(grouped_norm(b, x, getattr(w, name + "_norm")), (n_hc * n_embd, n)), "hc_norm", il)
    low = ops.silu(ops.scale(b.mm(getattr(w, name + "_down"), normed), 1.0 / n_hc))
    gate = b.linear(getattr(w, name + "_up"), low, "hc_gate", il)
    gated = ops.reshape(ops.mul(normed, ops.sigmoid(gate)), x.ne[:3])
    streams = [ops.view(gated, (n_embd, n), (gated.nb[2],), i * gated.nb[1]) for i in range(n_hc)]
    total = streams[0]
    for y in streams[1:]:
        total = ops.add(total, y)
    return b.cb(ops.scale(total, 1.0 / n_hc), "hc_mixed", il), normed


def combine(b: Builder, x: Tensor, y: Tensor, inject: Tensor, il: int) -> Tensor:
    """The streams x [n_embd, hc, n] plus y [n_embd, n], with a weight of each stream around 1."""
    n_embd, n_hc, n = x.ne[:3]
    weight = ops.scale(ops.sigmoid(ops.scale(inject, 1.0 / n_hc)), 2.0)
    y = ops.mul(ops.repeat(ops.reshape(y, (n_embd, 1, n)), x.ne), ops.reshape(weight, (1, n_hc, n)))
    return b.cb(ops.add(x, y), "hc_combine", il)


def add_ngrams(b: Builder, w: Group, x: Tensor, embd: Tensor, il: int) -> Tensor:
    """The streams x [n_embd, hc, n_tokens] plus what the table holds: as much of it as matches them, and a convolution of that."""
    n_embd, n_hc, n = x.ne[:3]
    key = grouped_norm(b, ops.reshape(b.mm(w.ple_key, embd), x.ne[:3]), w.ple_norm_key)
    match = ops.scale(ops.sum_rows(ops.mul(key, grouped_norm(b, x, w.ple_norm_query))), n_embd ** -0.5)
    root = ops.mul(ops.sgn(match), ops.sqrt(ops.clamp(ops.abs(match), 1e-6, float("inf"))))
    gate = b.cb(ops.sigmoid(root), "ple_gate", il)
    value = ops.repeat(ops.reshape(b.mm(w.ple_value, embd), (n_embd, 1, n)), x.ne)
    value = b.cb(ops.mul(value, gate), "ple_gated_value", il)
    y = ops.reshape(grouped_norm(b, value, w.ple_norm_conv), (n_hc * n_embd, n))
    y = b.cb(ops.reshape(ops.silu(dilated_conv(b, y, w.ple_conv1d, il)), x.ne), "ple_conv_out", il)
    return ops.add(x, ops.add(value, y))


def dilated_conv(b: Builder, x: Tensor, p: Param, il: int) -> Tensor:
    """Causal convolution of x [channels, n_tokens] whose taps lie as far apart as an n-gram is long."""
    assert b.hp.ngrams is not None
    kernel, apart = p.weight, len(b.hp.ngrams.factors)
    n_taps, channels = kernel.ne[:2]
    x = b.by_seq(x)
    padded = b.history(x, b.rs.p[il], (n_taps - 1) * apart, il)
    total = None
    for k in range(n_taps):
        shifted = ops.view(padded, (x.ne[1], channels, x.ne[2]), padded.nb[1:3], k * apart * padded.nb[0])
        factor = ops.cast(ops.view(kernel, (1, channels), (kernel.nb[1],), k * kernel.nb[0]), F32)
        term = ops.mul(ops.cont(ops.transpose(shifted)), ops.reshape(factor, (channels,)))
        total = term if total is None else ops.add(total, term)
    assert total is not None
    return total


def graph(b: Builder) -> None:
    hp, n_hc = b.hp, hc(b.hp)
    x = b.inp_embd()
    embd = b.ngram_embd(b.w.per_layer_token_embd) if hp.ngrams else None
    x = b.cb(ops.repeat(ops.reshape(x, (hp.n_embd, 1, b.n_tokens)), (hp.n_embd, n_hc, b.n_tokens)), "hc_init")
    for il, w in b.layers():
        if il == hp.ngram_layer and embd is not None:
            x = add_ngrams(b, w, x, embd, il)
        y, normed = mix(b, w, "hc_attn", x, il)
        inject = b.linear(w.hc_attn_inject, normed, "hc_inject", il)
        y = delta_net(b, w, y, il, ops.sigmoid) if hp.is_recurrent(il) else gated_attention(b, w, y, il)
        y, inject, flat = b.out_ids(il, y, inject, ops.reshape(x, (n_hc * hp.n_embd, b.n_tokens)))
        x = combine(b, ops.reshape(flat, (hp.n_embd, n_hc, flat.ne[1])), y, inject, il)
        y, normed = mix(b, w, "hc_ffn", x, il)
        inject = b.linear(w.hc_ffn_inject, normed, "hc_inject", il)
        x = b.cb(combine(b, x, experts(b, w, y, il), inject, il), "l_last", il)
    b.finish(b.cb(mix(b, b.w, "output_hc", x)[0], "result_norm"), norm=False)
