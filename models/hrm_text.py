"""hrm_text: HRM-Text; a low and a high stack run in cycles over one stream of tokens, each pass with its own cache."""
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
    hp = HParams.read(kv, "embedding_scale", rope_mode=NEOX)
    per_stack, h_cycles, l_cycles = cycles(hp)
    if min(per_stack, h_cycles, l_cycles) < 1 or hp.n_layer != per_stack * h_cycles * (l_cycles + 1):
        raise ModelError(f"{hp.n_layer} layers are not {h_cycles} times {l_cycles} low stacks and a high one of {per_stack}")
    return hp


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings(norm=False)
    t("hrm.z_l_init", hp.n_embd, suffix="")
    for il in range(2 * cycles(hp)[0]):                  # the low stack's layers, then the high one's
        w = t.blk[il]
        w.qkv(il)
        w("attn_gate", hp.n_embd, hp.n_embd_head_k * hp.n_head[il])
        w.attn_out(il)
        w.ffn(il)


def cycles(hp: HParams) -> tuple[int, int, int]:
    """(layers per stack, high cycles, low cycles in each)"""
    return hp.keys.number("hrm.layers_per_stack"), hp.keys.number("hrm.h_cycles"), hp.keys.number("hrm.l_cycles")


def stack(b: Builder, x: Tensor, slot: int, block: int) -> Tensor:
    """Layers block, block + 1, .. of the file, their K and V in cache layers slot, slot + 1, ..; norms have no weights."""
    for il, w in enumerate(b.w.blk[block:block + cycles(b.hp)[0]], slot):
        y = b.norm(x, None, "attn_norm", il)
        gate = b.linear(w.attn_gate, y, "attn_gate_proj", il)
        q, k, v = b.qkv(w, y, il)
        y = b.attn(None, b.rope(q, il), b.rope(k, il), v, il)
        y = b.linear(w.attn_output, b.gate_attn(y, ops.sigmoid(gate), il), "attn_out", il)
        x = b.residual(x, y, "attn_add", il)
        y = b.norm(x, None, "ffn_norm", il)
        x = b.layer_out(b.residual(x, b.ffn(w, y, il), "ffn_add", il), il)
    return b.norm(x, None, "stack_norm", slot)


def graph(b: Builder) -> None:
    per_stack, h_cycles, l_cycles = cycles(b.hp)
    high, low, slot = b.inp_embd(), b.w.hrm_z_l_init.weight, 0
    for _ in range(h_cycles):
        for _ in range(l_cycles):
            low = stack(b, ops.add(high, low), slot, 0)
            slot += per_stack
        high = stack(b, ops.add(high, low), slot, per_stack)
        slot += per_stack
    high, = b.out_ids(b.hp.n_layer - 1, high)
    b.finish(high, norm=False)
