"""chameleon: Chameleon, text; layer norms of Q and K with weights of each head, in the 34B norms after the blocks."""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ggraph import ops
from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NORMAL
from ggraph.tensor import Tensor
from ggraph.weights import Weights

IMAGE_TOKENS = 4, 8196                                  # they are never chosen: what is generated is text


def hparams(kv: Mapping[str, Any]) -> HParams:
    return HParams.read(kv, rope_mode=NORMAL).replace(f_norm_eps=1e-5)


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings(output_bias=False)
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        for name, n in (("attn_q_norm", hp.n_head[il]), ("attn_k_norm", hp.n_head_kv[il])):
            w(name, hp.n_embd_head_k, n)
            getattr(w, name).bias = t.optional(f"blk.{il}.{name}.bias", (hp.n_embd_head_k, n))
        w.qkv(il)
        w.attn_out(il, bias=False)
        w.ffn(il, bias=False)


def text_only(x: Tensor) -> Tensor:
    """Logits [n_vocab, n] with those of image tokens out of reach."""
    (first, end), (n, rows) = IMAGE_TOKENS, x.ne[:2]
    parts = [ops.view(x, (size, rows), (x.nb[1],), start * x.nb[0]) for start, size in ((0, first), (end, n - end))]
    return ops.concat(ops.concat(parts[0], ops.fill(ops.repeat(parts[0], (end - first, rows)), -math.inf), 0), parts[1], 0)


def graph(b: Builder) -> None:
    late = bool(b.hp.keys("swin_norm", False))                                    # norms after the blocks
    x = b.inp_embd()
    for il, w in b.layers():
        y = x if late else b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        q, k = b.layer_norm(q, w.attn_q_norm, "Qcur_normed", il), b.layer_norm(k, w.attn_k_norm, "Kcur_normed", il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, b.norm(y, w.attn_norm, "attn_norm", il) if late else y, "ffn_inp", il)
        y = b.ffn(w, x if late else b.norm(x, w.ffn_norm, "ffn_norm", il), il)
        x = b.layer_out(b.residual(x, b.norm(y, w.ffn_norm, "ffn_norm", il) if late else y, "ffn_out", il), il)
    b.finish(x, text_only)
