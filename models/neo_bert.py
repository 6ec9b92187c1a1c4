"""neo-bert: NeoBERT; norms before both blocks, gate and up in one matrix, the final norm called `enc.output_norm`."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.ops import NORMAL
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    return HParams.read(kv, rope_mode=NORMAL, cache=False, head=False)


def weights(t: Weights) -> None:
    t("token_embd", t.hp.n_embd, t.hp.n_vocab)
    t.classifier()
    t.norm("enc.output_norm")
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        w.qkv(il, bias=False)
        w.attn_out(il, bias=False)
        w("ffn_up", t.hp.n_embd, 2 * t.hp.n_ff[il])
        w("ffn_down", t.hp.n_ff[il], t.hp.n_embd)


def graph(b: Builder) -> None:
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.ffn(w, b.norm(x, w.ffn_norm, "ffn_norm", il), il)
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(b.norm(x, b.w.enc_output_norm, "result_norm"), norm=False)
