"""nanbeige: Nanbeige 4; llama whose layers run several times, each time with K and V of their own."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build import Builder
from ggraph.errors import ModelError
from ggraph.hparams import HParams
from ggraph.ops import NORMAL
from ggraph.weights import Weights

N_LAYER_MAX = 1024


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NORMAL)
    n = n_loops(hp)
    if not 1 <= n <= N_LAYER_MAX // hp.n_layer:
        raise ModelError(f"{hp.arch}.num_loops is {n} for {hp.n_layer} layers; at most {N_LAYER_MAX} are run")
    return hp.replace(n_layer=hp.n_layer * n, n_head=hp.n_head * n, n_head_kv=hp.n_head_kv * n, n_ff=hp.n_ff * n)


def n_loops(hp: HParams) -> int:
    return int(hp.keys.number("num_loops", 1))


def weights(t: Weights) -> None:
    t.blk = t.blk[:len(t.blk) // n_loops(t.hp)] * n_loops(t.hp)                   # the same ones in every loop
    t.embeddings()
    t.rope_factors()
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        w.qkv(il)
        w.attn_out(il)
        w.ffn(il)


def graph(b: Builder) -> None:
    hp = b.hp
    n_file, norm_between = hp.n_layer // n_loops(hp), not hp.keys("skip_loop_final_norm", False)
    x = b.inp_embd()
    for il, w in b.layers():
        y = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, y, il)
        y = b.attn(w.attn_output, b.rope(q, il), b.rope(k, il), v, il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        x = b.layer_out(b.residual(x, b.ffn(w, y, il), "ffn_out", il), il)
        if norm_between and (il + 1) % n_file == 0 and il + 1 < hp.n_layer:
            x = b.norm(x, b.w.output_norm, "loop_norm", il)
    b.finish(x)
