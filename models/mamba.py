"""mamba: Mamba 1 and Falcon Mamba; selective state spaces in every layer, no attention, no feed-forward."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.hparams import HParams
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv)
    return hp.recurrent((True,) * hp.n_layer)


def weights(t: Weights) -> None:
    t.embeddings()
    for _, w in t.layers():
        w.norm("attn_norm")
        w.mamba()


def graph(b: Builder) -> None:
    falcon = bool(b.hp.keys("ssm.dt_b_c_rms", False))
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        y = b.mamba(w, y, il, norm=falcon)
        y, x = b.out_ids(il, y, x)
        x = b.layer_out(b.add(y, x, "residual", il), il)
    b.finish(x)
