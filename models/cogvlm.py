"""cogvlm: CogVLM, text; the second set of weights, for images, is not used."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph import ops
from ggraph.build import Builder
from ggraph.errors import ModelError
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.tensor import Tensor
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    return HParams.read(kv, rope_mode=NEOX, rope_freq_base=10000.0, rope_scaling="none", rope_attn_factor=1.0)


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings()
    t.unused("rope_freqs.weight")
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        w("attn_qkv", hp.n_embd, 3 * hp.n_embd_head_k * hp.n_head[il])
        w.attn_out(il, bias=False)
        w.ffn(il, bias=False)
        w.unused(*(f"vis_{name}.weight" for name in ("attn_qkv", "attn_output", "gate", "up", "down")))


def heads(qkv: Tensor, hp: HParams, i: int, n_head: int) -> Tensor:
    """Q, K or V (i = 0, 1, 2) of qkv [3 n_head head, n_tokens]; each starts n_embd behind the one before."""
    head, size = hp.n_embd_head_k, qkv.nb[0]
    return ops.view(qkv, (head, n_head, qkv.ne[1]), (head * size, qkv.nb[1]), i * hp.n_embd * size)


def graph(b: Builder) -> None:
    if b.embd:
        raise ModelError("cogvlm takes vectors for images, and images are not supported; give token ids")
    hp = b.hp
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        qkv = b.linear(w.attn_qkv, y, "wqkv", il)
        q, k, v = (heads(qkv, hp, i, n) for i, n in enumerate((hp.n_head[il], hp.n_head_kv[il], hp.n_head_kv[il])))
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        x = b.layer_out(b.residual(x, b.ffn(w, y, il), "ffn_out", il), il)
    b.finish(x)
