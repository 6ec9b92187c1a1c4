"""gemma4: Gemma 4, text; heads of window layers have a size of their own, layers share K and V, and each has its own embeddings.

Most sizes have no experts; where a layer has some, they stand beside its dense feed-forward.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph import ops
from ggraph.build import Builder
from ggraph.build.core import as_f32
from ggraph.errors import ModelError
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.tensor import Tensor
from ggraph.weights import Group, Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX)
    k = hp.keys
    n_shared = int(k.number("attention.shared_kv_layers", 0))
    if not 0 <= n_shared < hp.n_layer:
        raise ModelError(f"{hp.arch}.attention.shared_kv_layers is {n_shared} of {hp.n_layer} layers")
    hp = hp.replace(f_attention_scale=1.0, rope_freq_scale_swa=1.0, rope_freq_base_swa=float(k("rope.freq_base_swa", 10000.0)),
                    f_final_logit_softcapping=float(k("final_logit_softcapping", 30.0)),
                    n_embd_head_k_swa=int(k.number("attention.key_length_swa")), n_layer_kv=hp.n_layer - n_shared,
                    n_embd_head_v_swa=int(k.number("attention.value_length_swa")),
                    n_rot_swa=int(k.number("rope.dimension_count_swa", hp.n_rot)))
    layers = k.per_layer("attention.sliding_window_pattern", hp.n_layer, convert=bool)
    return hp.window(k.number("attention.sliding_window"), layers)


def n_per_layer(hp: HParams) -> int:
    """Elements of the embedding that each layer has of each token; 0: none."""
    return int(hp.keys.number("embedding_length_per_layer_input"))


def weights(t: Weights) -> None:
    hp, n = t.hp, n_per_layer(t.hp)
    t.embeddings()
    if n:
        table_weights(t, n)
    full = [il for il in range(hp.n_layer) if not hp.is_swa(il)]
    factors = t.take("rope_freqs", (hp.n_embd_head_k // 2,), False, False, ".weight") if full else None
    for il, w in t.layers():
        w.norm("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        attention_weights(hp, w, il)
        w.alias("rope_freqs", factors if il in full else None)
        w.ffn(il)
        w("layer_output_scale", 1, optional=True)
        if w.shape("ffn_gate_inp.weight"):
            expert_weights(hp, w, il)
        if n:
            own_weights(hp, w, n)


def table_weights(t: Weights, n: int) -> None:
    """Where `per_layer` takes n elements of each layer from."""
    t("per_layer_token_embd", n * t.hp.n_layer, t.hp.n_vocab)
    t("per_layer_model_proj", t.hp.n_embd, n * t.hp.n_layer)
    t("per_layer_proj_norm", n)


def own_weights(hp: HParams, w: Group, n: int) -> None:
    """How `from_own` adds them."""
    w("inp_gate", hp.n_embd, n)
    w("proj", n, hp.n_embd)
    w.norm("post_norm")


def attention_weights(hp: HParams, w: Group, il: int) -> None:
    """One matrix, or Q alone, with K where the layer keeps some and V where it is not K."""
    q, k, v = hp.head_k(il) * hp.n_head[il], hp.n_embd_k_gqa(il), hp.n_embd_v_gqa(il)
    if w("attn_qkv", hp.n_embd, q + k + v, optional=True) is None:
        w("attn_q", hp.n_embd, q)
        w("attn_k", hp.n_embd, k, optional=not hp.has_kv(il))
        w("attn_v", hp.n_embd, v, optional=True)
    w.attn_out(il)
    w.norm("attn_q_norm", n=hp.head_k(il))
    w.norm("attn_k_norm", n=hp.head_k(il), optional=not hp.has_kv(il))


def expert_weights(hp: HParams, w: Group, il: int) -> None:
    """The router's scale is one of its input."""
    w.alias("router_scale", w("ffn_gate_inp", hp.n_embd, suffix=".scale"))
    w.experts(il)
    w.ffn_gate_inp.scale = None
    w.norm("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")


def graph(b: Builder) -> None:
    hp = b.hp
    x = b.inp_embd()
    if not b.embd:                                   # vectors that are given come scaled
        x = b.scale(x, hp.n_embd ** 0.5, "inp_scaled")
    own = per_layer(b, x, n_per_layer(hp)) if n_per_layer(hp) else None
    for il, w in b.layers():
        y = attention(b, w, b.norm(x, w.attn_norm, "attn_norm", il), il)
        y, x, *rest = b.out_ids(il, y, x, *([] if own is None else [of_layer(own, il)]))
        x = b.residual(x, b.norm(y, w.post_attention_norm, "attn_post_norm", il), "attn_out", il)
        y = feed_forward(b, w, x, il)
        x = ops.add(x, b.norm(y, w.post_ffw_norm, "ffn_post_norm", il))
        if rest:
            x = ops.add(x, from_own(b, w, b.cb(x, "pe_in", il), rest[0], "per_layer_embd_out", il))
        if w.layer_output_scale is not None:
            x = b.cb(ops.mul(x, w.layer_output_scale.weight), "out_scaled", il)
        x = b.layer_out(x, il)
    b.finish(x)


def per_layer(b: Builder, x: Tensor, n: int) -> Tensor:
    """The embeddings of each layer [n, n_layer, n_tokens]: half from a table of their own, half made of x."""
    hp, table = b.hp, b.w.per_layer_token_embd.weight
    # As in llama.cpp, vectors that are given have the first token's.
    rows = as_f32(ops.view(table, table.ne[:1])) if b.embd else ops.get_rows(table, b.inp_tokens())
    rows = ops.scale(ops.reshape(rows, (n, hp.n_layer, 1 if b.embd else b.n_tokens)), n ** 0.5)
    y = ops.reshape(ops.scale(b.mm(b.w.per_layer_model_proj, x), hp.n_embd ** -0.5), (n, hp.n_layer, b.n_tokens))
    y = b.norm(y, b.w.per_layer_proj_norm, "per_layer_proj")
    return b.scale(ops.add(y, b.cb(rows, "inp_per_layer_selected")), 2 ** -0.5, "inp_per_layer")


def of_layer(own: Tensor, il: int) -> Tensor:
    """[n, n_tokens]"""
    return ops.view(own, (own.ne[0], own.ne[2]), (own.nb[2],), il * own.nb[1])


def attention(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    """Without a matrix for V it is K, before its norm; both come from an earlier layer where this one keeps none."""
    hp, shape = b.hp, (b.hp.head_k(il), b.hp.n_head_kv[il], b.n_tokens)
    if w.attn_qkv is not None:
        q, k, v = b.qkv(w, x, il)
    else:
        q = ops.reshape(b.linear(w.attn_q, x, "Qcur", il), (shape[0], hp.n_head[il], b.n_tokens))
    q = b.rope(b.norm(q, w.attn_q_norm, "Qcur_normed", il), il)
    if not hp.has_kv(il):
        return b.attn(w.attn_output, q, None, None, il)
    if w.attn_qkv is None:
        k = ops.reshape(b.linear(w.attn_k, x, "Kcur", il), shape)
        v = k if w.attn_v is None else ops.reshape(b.linear(w.attn_v, x, "Vcur", il), shape)
    k = b.rope(b.norm(k, w.attn_k_norm, "Kcur_normed", il), il)
    return b.attn(w.attn_output, q, k, b.norm(v, None, "Vcur_normed", il), il)


def feed_forward(b: Builder, w: Group, x: Tensor, il: int) -> Tensor:
    y = b.ffn(w, b.norm(x, w.ffn_norm, "ffn_norm", il), il, act="gelu")
    if "ffn_gate_inp" not in vars(w):
        return y
    hp = b.hp
    scaled = ops.scale(ops.rms_norm(x, hp.f_norm_rms_eps), hp.n_embd ** -0.5)
    logits = b.linear(w.ffn_gate_inp, ops.mul(scaled, w.router_scale.weight), "ffn_moe_logits", il)
    experts = b.moe(w, b.norm(x, w.pre_ffw_norm_2, "ffn_norm_2", il), il, act="gelu", logits=logits)
    y, experts = b.norm(y, w.post_ffw_norm_1, "ffn_mlp", il), b.norm(experts, w.post_ffw_norm_2, "ffn_moe", il)
    return b.add(y, experts, "ffn_moe_combined", il)


def from_own(b: Builder, w: Group, x: Tensor, embd: Tensor, name: str, il: int) -> Tensor:
    """What x lets through of the layer's own embedding."""
    y = b.mm(w.proj, ops.mul(ops.gelu(b.mm(w.inp_gate, x)), embd))
    return b.norm(y, w.post_norm, name, il)
