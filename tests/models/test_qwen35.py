"""Qwen 3.5 0.8B, two layers of it: the shapes of its named nodes and states; and what its state takes, whatever the context."""
from __future__ import annotations

from collections.abc import Iterator

import pytest

import ggraph
from ggraph.observe import Observed
from tests import spec

N_EMBD, N_FF, HEAD, N_HEAD, N_HEAD_KV, N_CONV, INNER = 1024, 3584, 256, 8, 2, 6144, 2048
KEYS = {"context_length": 262144, "embedding_length": N_EMBD, "feed_forward_length": N_FF, "block_count": 2,
        "attention.head_count": N_HEAD, "attention.head_count_kv": N_HEAD_KV, "attention.key_length": HEAD,
        "attention.value_length": HEAD, "rope.dimension_count": 64, "rope.dimension_sections": [11, 11, 10, 0],
        "rope.freq_base": 1e7, "attention.recurrent_layers": [1, 0], "ssm.conv_kernel": 4, "ssm.state_size": 128,
        "ssm.group_count": 16, "ssm.time_step_rank": 16, "ssm.inner_size": INNER}
FFN = {"ffn_gate": (N_EMBD, N_FF), "ffn_up": (N_EMBD, N_FF), "ffn_down": (N_FF, N_EMBD), "attn_norm": (N_EMBD,),
       "post_attention_norm": (N_EMBD,)}
DELTA = {"attn_qkv": (N_EMBD, N_CONV), "attn_gate": (N_EMBD, INNER), "ssm_conv1d": (4, N_CONV), "ssm_beta": (N_EMBD, 16),
         "ssm_alpha": (N_EMBD, 16), "ssm_norm": (128,), "ssm_out": (INNER, N_EMBD)}
ATTENTION = {"attn_q": (N_EMBD, 2 * HEAD * N_HEAD), "attn_k": (N_EMBD, HEAD * N_HEAD_KV), "attn_v": (N_EMBD, HEAD * N_HEAD_KV),
             "attn_output": (HEAD * N_HEAD, N_EMBD), "attn_q_norm": (HEAD,), "attn_k_norm": (HEAD,)}
N = 5                                       # tokens of the one sequence
NODES = {
    "inp_embd": (N_EMBD, N), "linear_attn_qkv_mixed-0": (N_CONV, N), "conv_states-0": (3 * N_CONV, 1),
    "conv_input-0": (3 + N, N_CONV, 1), "conv_output_silu-0": (N_CONV, N, 1), "q_conv_predelta-0": (128, 16, N, 1),
    "k_conv_predelta-0": (128, 16, N, 1), "beta_sigmoid-0": (1, 16, N, 1), "gate-0": (16, N), "state_predelta-0": (128, 128, 16, 1),
    "attn_output-0": (128, 16, N, 1), "attn_out_norm-0": (128, 16, N, 1), "z-0": (INNER, N), "linear_attn_out-0": (N_EMBD, N),
    "Qcur_normed-1": (HEAD, N_HEAD, N), "Kcur_normed-1": (HEAD, N_HEAD_KV, N), "Vcur-1": (HEAD, N_HEAD_KV, N),
    "gate_sigmoid-1": (HEAD * N_HEAD, N), "attn_gated-1": (HEAD * N_HEAD, N), "l_out-1": (N_EMBD, 1), "result_output": (128, 1)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ggraph.Model]:
    base = spec.specs()["qwen35-dense"]
    known = {key: kind for key, kind, _ in base["kv"]}
    kv = [e for e in base["kv"] if e[0].removeprefix("qwen35.") not in KEYS]
    kv += [["qwen35." + key, known["qwen35." + key], value] for key, value in KEYS.items()]
    layers = [{**DELTA, **FFN}, {**ATTENTION, **FFN}]
    tensors = [[f"blk.{il}.{name}.weight", list(shape), "F32" if len(shape) == 1 or "conv" in name else "Q4_K"]
               for il, names in enumerate(layers) for name, shape in names.items()]
    tensors += [["blk.0.ssm_a", [16], "F32"], ["blk.0.ssm_dt.bias", [16], "F32"], ["token_embd.weight", [N_EMBD, 128], "Q6_K"],
                ["output_norm.weight", [N_EMBD], "F32"]]
    path = spec.write({"arch": "qwen35", "kv": kv, "tensors": tensors}, tmp_path_factory.mktemp("m") / "m.gguf")
    with ggraph.Model(path, repack="off") as model:
        yield model


def trimmed(ne: tuple[int, ...], n: int) -> tuple[int, ...]:
    assert all(size == 1 for size in ne[n:])
    return tuple(int(size) for size in ne[:n])


def test_named_nodes(model: ggraph.Model) -> None:
    found: dict[str, set[tuple[int, ...]]] = {}

    def look(seen: Observed) -> None:
        for node, shape in seen.shapes.items():
            if node.name in NODES:
                found.setdefault(node.name, set()).add(trimmed(shape.ne, len(NODES[node.name])))
    with ggraph.Context(model, n_ctx=256, n_ubatch=16, n_threads=2, on_step=look) as ctx:
        batch = ggraph.Batch()
        for token in range(N):
            batch.add(token, None, 0, output=token == N - 1)
        ctx.process("decode", batch)
        rs = ctx.memory.rs
        assert rs is not None and rs.r[0].ne[0] == 3 * N_CONV and rs.s[0].ne[0] == 16 * 128 * 128
        rope = next(n for n in next(iter(ctx.plans.plans.values())).graph.nodes if n.op == "rope")
        assert rope.params["n_dims"] == 64 and rope.params["sections"] == (11, 11, 10, 0)
    assert {name: shape in found.get(name, ()) for name, shape in NODES.items()} == dict.fromkeys(NODES, True)


def test_the_state_takes_as_much_whatever_the_context(model: ggraph.Model) -> None:
    sizes = []
    for n_ctx in (256, 4096, 16384):
        with ggraph.Context(model, n_ctx=n_ctx, n_ubatch=16, n_threads=2) as ctx:
            assert ctx.memory.rs is not None
            sizes.append((ctx.memory.rs.nbytes, sum(g.nbytes for g in ctx.memory.kv)))
    assert len({state for state, _ in sizes}) == 1 and sizes[2][1] == 64 * sizes[0][1]
