"""laguna: Laguna; a gate on the attention's output, windows without YaRN, sigmoid experts beside a shared one."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph import ops
from ggraph.build import Builder
from ggraph.build.moe import SIGMOID
from ggraph.hparams import HParams
from ggraph.ops import NEOX
from ggraph.weights import Weights


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX, rope_scaling_swa=False)
    hp = hp.replace(rope_freq_base_swa=float(hp.keys("rope.freq_base_swa", hp.rope_freq_base)),
                    n_rot_swa=int(hp.keys("rope.dimension_count_swa", 0)),
                    n_ff_shexp=hp.n_ff_shexp or hp.n_ff_exp[0] * (hp.n_expert_shared or 1),
                    expert_gating_func=hp.expert_gating_func or SIGMOID)
    return hp.window(hp.keys("attention.sliding_window", 0), hp.swa_pattern(4, dense_first=True))


def weights(t: Weights) -> None:
    hp = t.hp
    t.embeddings()
    for il, w in t.layers():
        w.norm("attn_norm", "ffn_norm")
        w.norm("attn_q_norm", "attn_k_norm", n=hp.n_embd_head_k)
        w.qkv(il)
        w("attn_gate", hp.n_embd, gate_width(t, il))
        w.attn_out(il)
        if il < hp.n_layer_dense_lead:
            w.ffn(il)
        else:
            w.experts(il, probs_bias=True)
            w.ffn(il, n_ff=hp.n_ff_shexp, suffix="_shexp")


def gate_width(t: Weights, il: int) -> int:
    """A gate of each head, or of each element where the file's is wider."""
    gate = t.file.tensors.get(f"blk.{il}.attn_gate.weight")
    per_head = gate is None or gate.ne[1] == t.hp.n_head[il]
    return t.hp.n_head[il] * (1 if per_head else t.hp.n_embd_head_k)


def graph(b: Builder) -> None:
    hp = b.hp
    x = b.inp_embd()
    for il, w in b.layers():
        n = b.norm(x, w.attn_norm, "attn_norm", il)
        q, k, v = b.qkv(w, n, il)
        q, k = b.qk_norm(w, q, k, il)
        y = b.attn(None, b.rope(q, il), b.rope(k, il), v, il)
        gate = b.cb(ops.softplus(b.linear(w.attn_gate, n, "attn_gate_proj", il)), "attn_gate_softplus", il)
        y = b.linear(w.attn_output, b.gate_attn(y, gate, il), "attn_o_proj", il)
        y, x = b.out_ids(il, y, x)
        x = b.residual(x, y, "ffn_inp", il)
        y = b.norm(x, w.ffn_norm, "ffn_norm", il)
        if il < hp.n_layer_dense_lead:
            y = b.ffn(w, y, il)
        else:
            shared = b.ffn(w, y, il, suffix="_shexp")
            y = b.moe(w, y, il, gating=hp.expert_gating_func, norm_w=hp.expert_weights_norm, w_scale=hp.expert_weights_scale)
            y = b.add(y, shared, "ffn_out", il)
        x = b.layer_out(b.residual(x, y, "ffn_out", il), il)
    b.finish(x)
