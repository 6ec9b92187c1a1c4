"""Fusions of the CUDA backend: results are those of single nodes, and how many launches are left."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import ggraph
from ggraph import ops
from ggraph.dtypes import F16, F32, Q4_K, Q6_K, Q8_0, DType
from ggraph.tensor import Tensor
from tests.backends.cuda.graphs import Array, both, decode, deep, model, run, unfused
from tests.backends.opcase import Build

SIZES = ({"n_tokens": 7, "n_kv": 64}, {"n_tokens": 1, "n_kv": 64})
MANY = {"n_tokens": 20, "n_kv": 64}


def same(fused: Sequence[Array], plain: Sequence[Array]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(fused, plain, strict=True))


def linear(g: Build, x: Tensor, n: int, type: DType = Q4_K) -> Tensor:
    return ops.mul_mat(g.weight(type, x.ne[0], n), x)


# --- products

def attention_inputs(g: Build) -> list[Tensor]:
    """Q, K, V with biases, from normed states; V of another type."""
    x = ops.mul(ops.rms_norm(g.f32(256, g.n_tokens), 1e-6), g.f32(256))
    q, k, v = (linear(g, x, n, type) for n, type in ((64, Q4_K), (33, Q4_K), (32, Q6_K)))
    return [ops.add(q, g.f32(64)), k, ops.add(v, g.f32(32))]


@pytest.mark.parametrize("present", SIZES)
def test_a_norm_and_the_products_that_read_it_are_two_launches(present: dict[str, int]) -> None:
    fused, plain, few, many = both(attention_inputs, present)
    assert same(fused, plain)
    assert len(few) == 2 and few[0] == "normalize" and few[1].startswith("matvec")
    assert len(many) == 7


def test_for_many_columns_each_product_is_a_launch_with_its_sums() -> None:
    def make(g: Build) -> list[Tensor]:
        x = ops.mul(ops.rms_norm(g.f32(256, 20), 1e-6), g.f32(256))
        return [ops.add(ops.add(linear(g, x, 64), g.f32(64)), g.f32(64, 20)), linear(g, x, 96)]
    fused, plain, few, _ = both(make)
    assert same(fused, plain) and few == ["normalize", "matmul_32", "matmul_32"]


def feed_forward(g: Build, glu: str = "swiglu", merged: bool = False, bias: bool = False) -> list[Tensor]:
    x = g.f32(256, g.n_tokens)
    y = ops.mul(ops.rms_norm(x, 1e-6), g.f32(256))
    if merged:
        both_halves = linear(g, y, 1024)
        gate, up = (ops.view(both_halves, (512, y.ne[1]), (both_halves.nb[1],), i * 512 * 4) for i in (0, 1))
    else:
        gate, up = linear(g, y, 512), linear(g, y, 512, Q8_0)
        if bias:
            gate, up = ops.add(gate, g.f32(512)), ops.add(up, g.f32(512))
    return [ops.add(linear(g, ops.OPS[glu](gate, up), 256), x)]


@pytest.mark.parametrize("present", [*SIZES, MANY])
def test_weights_of_plain_types_are_grouped_as_well(present: dict[str, int]) -> None:
    def make(g: Build) -> list[Tensor]:
        x = g.f32(256, g.n_tokens)
        y = ops.mul(ops.rms_norm(x, 1e-6), g.f32(256))
        gate, up = linear(g, y, 100, F16), linear(g, y, 100, F16)
        gate, up = ops.add(gate, g.f32(100)), ops.add(up, g.f32(100))
        z = ops.add(linear(g, y, 64, F16), g.f32(64))
        return [ops.add(linear(g, ops.swiglu(gate, up), 256, F16), x), z, linear(g, y, 32, F16)]
    fused, plain, few, many = both(make, present)
    assert same(fused, plain) and len(few) < len(many)
    assert present is MANY or len(few) == 4


@pytest.mark.parametrize("present", SIZES)
@pytest.mark.parametrize("form", [{}, {"glu": "geglu"}, {"merged": True}, {"bias": True}])
def test_a_feed_forward_block_is_three_launches(form: dict[str, object], present: dict[str, int]) -> None:
    fused, plain, few, _ = both(lambda g: feed_forward(g, **form), present)                   # type: ignore[arg-type]
    assert same(fused, plain) and [name.split("_")[0] for name in few] == ["normalize", "gated", "matvec"]


def test_a_row_that_is_no_whole_number_of_groups_stays_in_floats() -> None:
    def make(g: Build) -> list[Tensor]:
        x = g.f32(256, g.n_tokens)
        return [ops.swiglu(linear(g, x, 40), linear(g, x, 40))]
    fused, plain, few, _ = both(make)
    assert same(fused, plain) and few == ["quantize", "gated_8"]


# --- norms

def between_blocks(g: Build) -> list[Tensor]:
    x = g.f32(256, g.n_tokens)
    y = ops.add(ops.mul(ops.rms_norm(g.f32(256, g.n_tokens), 1e-6), g.f32(256)), x)
    z = ops.mul(ops.rms_norm(y, 1e-6), g.f32(256))
    return [linear(g, z, 64), y]


def residual_and_norm(g: Build) -> list[Tensor]:
    y = ops.add(g.f32(256, g.n_tokens), g.f32(256, g.n_tokens))
    return [linear(g, ops.mul(ops.norm(y, 1e-6), g.f32(256)), 64), y]


@pytest.mark.parametrize("make", [between_blocks, residual_and_norm])
def test_the_residual_and_the_norm_on_both_sides_of_it_are_one_launch(make: object) -> None:
    fused, plain, few, _ = both(make)                                                         # type: ignore[arg-type]
    assert same(fused, plain) and few == ["normalize", "matvec_8"]


def test_what_is_read_after_the_split_is_written() -> None:
    (value, normed), kernels = run(lambda g: [linear(g, ops.mul(ops.rms_norm(g.f32(256, 4), 1e-6), g.f32(256)), 64)], keep=[1])
    with unfused():
        (plain, plain_normed), _ = run(lambda g: [linear(g, ops.mul(ops.rms_norm(g.f32(256, 4), 1e-6), g.f32(256)), 64)], keep=[1])
    assert kernels == ["normalize", "matvec_4"] and same([value, normed], [plain, plain_normed])
    (_, norm), kernels = run(lambda g: [linear(g, ops.mul(ops.rms_norm(g.f32(256, 4), 1e-6), g.f32(256)), 64)], keep=[0])
    assert kernels == ["normalize", "chain", "matvec_4"] and np.isfinite(norm).all()


# --- heads

def heads(g: Build, type_k: DType = F16, type_v: DType = F16, *, norm: bool = True, rope: bool = True,
          rotate: int = 0) -> list[Tensor]:
    d, n_head, n_kv, n = 64, 4, 2, g.n_tokens
    q, k, v = g.f32(d, n_head, n), g.f32(d, n_kv, n), g.f32(d, n_kv, n)
    pos, cells = g.ints(500, n), g.distinct(64, n)
    caches = [g.any(t, d * n_kv, 64) for t in (type_k, type_v)]
    if norm:
        q, k = (ops.mul(ops.rms_norm(x, 1e-6), g.f32(d)) for x in (q, k))
    if rope:
        q, k = (ops.rope(x, pos, None, n_dims=d, mode=ops.NEOX, freq_base=1e4) for x in (q, k))
    if rotate:
        q, k, v = (ops.hadamard(x, rotate) for x in (q, k, v))
    stored = [ops.set_rows(c, ops.reshape(x, (d * n_kv, n)), cells) for c, x in zip(caches, (k, v))]
    seen = [ops.permute(ops.view(c, (d, n_kv, g.n_kv, 1), (c.type.row_bytes(d), c.nb[1], c.nb[2])), (0, 2, 1, 3)) for c in caches]
    y = ops.flash_attn_ext(ops.permute(q, (0, 2, 1, 3)), seen[0], seen[1], g.mask(F16, g.n_kv, n), None, scale=0.1)
    return [*stored, y]


@pytest.mark.parametrize("present", SIZES)
@pytest.mark.parametrize("form", [{}, {"norm": False}, {"rope": False}, {"norm": False, "rope": False},
                                  {"type_k": Q8_0, "type_v": Q8_0, "rotate": 64}, {"type_k": Q8_0}])
def test_all_between_products_and_attention_is_one_launch(form: dict[str, object], present: dict[str, int]) -> None:
    fused, plain, few, _ = both(lambda g: heads(g, **form), present)                          # type: ignore[arg-type]
    assert same(fused, plain)
    assert len(few) == 2 and few[0] == "heads" and few[1].startswith("attend")


# --- experts

def experts(g: Build, gating: str = "soft_max", bias: bool = False, factor: float = 1.0, choice_bias: bool = False) -> list[Tensor]:
    n_expert, n_used, n = 6, 3, g.n_tokens
    x = ops.mul(ops.rms_norm(g.f32(256, n), 1e-6), g.f32(256))
    logits = ops.mul_mat(g.f32(256, n_expert), x)
    probs = logits if gating == "after" else ops.sqrt(ops.softplus(logits)) if gating == "softplus" else ops.OPS[gating](logits)
    chosen = ops.top_k(ops.add(probs, g.f32(n_expert)) if choice_bias else probs, n_used)

    def product(y: Tensor, n_out: int, type: DType = Q4_K) -> Tensor:
        z = ops.mul_mat_id(g.any(type, y.ne[0], n_out, n_expert), y, chosen)
        return ops.add_id(z, g.f32(n_out, n_expert), chosen) if bias else z
    y = ops.reshape(x, (256, 1, n))
    down = product(ops.swiglu(product(y, 256), product(y, 256, Q6_K)), 64)
    weights = ops.reshape(ops.get_rows(ops.reshape(probs, (1, n_expert, n)), chosen), (n_used, n))
    if gating == "after":
        weights = ops.soft_max(weights)
    else:
        weights = ops.div(weights, ops.clamp(ops.sum_rows(weights), 1e-5, float("inf")))
    weights = ops.scale(weights, factor) if factor != 1 else weights
    parts = ops.mul(down, ops.reshape(weights, (1, n_used, n)))
    total, *rest = (ops.view(parts, (64, n), (parts.nb[2],), i * parts.nb[1]) for i in range(n_used))
    for part in rest:
        total = ops.add(total, part)
    return [ops.add(total, g.f32(64, n))]


@pytest.mark.parametrize("form", [{}, {"gating": "sigmoid", "choice_bias": True, "factor": 2.5}, {"gating": "softplus"},
                                  {"gating": "after", "bias": True}])
def test_a_mixture_of_experts_is_a_router_and_two_products(form: dict[str, object]) -> None:
    for present in SIZES:
        fused, plain, few, _ = both(lambda g: experts(g, **form), present)                    # type: ignore[arg-type]
        assert same(fused, plain)
        assert few[2:] == ["sort" if form.get("gating") == "after" else "route", "gated_id", "weighted_id"]


def test_many_tokens_of_experts_give_the_same() -> None:
    fused, plain, _, _ = both(lambda g: experts(g), {"n_tokens": 7, "n_kv": 64})
    wide, wide_plain, few, _ = both(lambda g: [ops.add(y, y) for y in experts(g)], {"n_tokens": 7, "n_kv": 64})
    assert same(fused, plain) and same(wide, wide_plain) and "weighted_id" in few


# --- recurrent layers

def recurrent(g: Build, n_snapshots: int = 1, bias: bool = False) -> list[Tensor]:
    d, n_head, n_key, taps, n, n_seqs = 32, 4, 2, 4, g.n_tokens, 2
    channels = d * (n_head + 2 * n_key)
    conv_cells, cells, rows = g.f32((taps - 1) * channels, 12), g.f32(d * d * n_head, 12), g.distinct(6, n_seqs)
    new = g.leaf(rows.type, (n_seqs, n_snapshots), 6 + np.arange(n_seqs * n_snapshots, dtype=np.int32))

    def to(i: int) -> Tensor:
        return ops.view(new, (n_seqs,), (), i * new.nb[1])
    x, back = g.f32(channels, n, n_seqs), n_snapshots - 1
    state = ops.reshape(ops.get_rows(conv_cells, rows), (taps - 1, channels, n_seqs))
    padded = ops.concat(ops.pad(state, (), (back,)) if back else state, ops.transpose(x), 0)
    kept = [ops.view(padded, state.ne[:3], padded.nb[1:3], (n + (back - i)) * padded.nb[0]) for i in range(n_snapshots)]
    kept = [ops.set_rows(conv_cells, ops.cont(k, ((taps - 1) * channels, n_seqs)), to(i)) for i, k in enumerate(kept)]
    window = ops.view(padded, (taps - 1 + n, channels, n_seqs), padded.nb[1:3], back * padded.nb[0])
    y = ops.ssm_conv(window, g.f32(taps, channels))
    y = ops.silu(ops.add(y, g.f32(channels)) if bias else y)

    def heads_of(first: int, n_of: int) -> Tensor:
        return ops.view(y, (d, n_of, n, n_seqs), (4 * d, y.nb[1], y.nb[2]), 4 * d * first)
    q, k = (ops.scale(ops.rms_norm(heads_of(i * n_key, n_key), 1e-6 / d), d ** -0.5) for i in (0, 1))
    decay = g.leaf(F32, (n_head,), -np.ones(n_head, np.float32))
    gate = ops.mul(ops.softplus(ops.add(g.f32(n_head, n * n_seqs), g.f32(n_head))), decay)
    beta = ops.sigmoid(g.f32(1, n_head, n, n_seqs))
    before = ops.reshape(ops.get_rows(cells, rows), (d, d, n_head, n_seqs))
    v = heads_of(2 * n_key, n_head)
    out = ops.gated_delta_net(q, k, v, ops.reshape(gate, (1, n_head, n, n_seqs)), beta, before, n_snapshots)
    size, y_size = d * d * n_head, d * n_head * n * n_seqs
    states = [ops.view(out, (size, n_seqs), (4 * size,), 4 * (y_size + i * n_seqs * size)) for i in range(n_snapshots)]
    stored = [ops.set_rows(cells, s, to(i)) for i, s in enumerate(states)]
    read = ops.view(out, (d, n_head, n, n_seqs), (4 * d, 4 * d * n_head, 4 * d * n_head * n))
    z = ops.mul(ops.mul(ops.rms_norm(read, 1e-6), g.f32(d)), ops.silu(g.f32(d, n_head, n, n_seqs)))
    return [*kept, *stored, linear(g, ops.reshape(z, (d * n_head, n * n_seqs)), 32, Q8_0)]


@pytest.mark.parametrize("present", SIZES)
@pytest.mark.parametrize("form", [{}, {"n_snapshots": 3}, {"bias": True}])
def test_a_recurrent_layer_is_a_convolution_a_rule_and_a_gated_norm(form: dict[str, int], present: dict[str, int]) -> None:
    fused, plain, few, _ = both(lambda g: recurrent(g, **form), present)                      # type: ignore[arg-type]
    assert same(fused, plain)
    assert [name for name in few if name != "chain"][:3] == ["conv_going_on", "delta_going_on", "normalize"]


# --- elements

def test_a_chain_of_elementwise_ops_is_one_launch() -> None:
    def make(g: Build) -> list[Tensor]:
        x = g.any(F32, 64, 5, g.n_tokens)
        y = ops.cont(ops.view(x, (64, 3, x.ne[2]), x.nb[1:3], offset=x.nb[1]), (192, x.ne[2]))
        return [ops.scale(ops.sub(g.f32(192, x.ne[2]), ops.mul(ops.tanh(y), g.f32(192))), 3.0, 1.0)]
    fused, plain, few, many = both(make)
    assert same(fused, plain) and few == ["chain"] and len(many) == 5


# --- models

QUICK = ("qwen35-dense", "qwen3moe-moe")
MORE = ("llama-dense", "gemma3-dense", "gpt-oss-moe", "mamba2-dense")
MODELS = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGRAPH_BACKEND", "cuda")
    monkeypatch.setenv("GGRAPH_CUDA_DEVICE", "emulator")


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_the_same_with_fewer_launches(name: str, tmp_path: Path) -> None:
    path = model(name, tmp_path)
    fused, few, _ = decode(path)
    with unfused():
        plain, many, _ = decode(path)
    assert np.isfinite(fused).all() and np.array_equal(fused, plain)
    assert all(a < b for a, b in zip(few, many))


@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("name", ["llama-dense", "qwen35-dense", "mamba2-dense", "falcon-h1-dense"])
def test_sequences_side_by_side_give_the_same(name: str, unified: bool, tmp_path: Path) -> None:
    path = model(name, tmp_path)
    fused, _, _ = decode(path, (5, 1, 2), n_seqs=3, kv_unified=unified)
    with unfused():
        plain, _, _ = decode(path, (5, 1, 2), n_seqs=3, kv_unified=unified)
    assert np.isfinite(fused).all() and np.array_equal(fused, plain)


@pytest.mark.usefixtures("emulated")
def test_a_token_of_a_dense_model_takes_at_most_nine_launches_per_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model("llama-dense", tmp_path, edit=deep(32))
    _, counts, _ = decode(path, (2, 1, 1))
    with capsys.disabled():
        print(f"\n  launches per decoded token of 32 layers: {counts[1]}, {counts[1] / 32:.2f} per layer")
    assert counts[1] <= 9 * 32


@pytest.mark.usefixtures("emulated")
def test_an_observed_node_is_not_fused_away(tmp_path: Path) -> None:
    path, seen = model("llama-dense", tmp_path), {}

    def look(name: str, array: Array, node: Tensor) -> None:
        seen[name] = np.array(array)
    hook = ggraph.Hook(lambda node: node.name in ("norm-0", "ffn_gate-1", "Kcur-0"), look)
    observed, _, _ = decode(path, (3, 1), on_node=hook)
    plain, _, _ = decode(path, (3, 1))
    assert set(seen) == {"norm-0", "ffn_gate-1", "Kcur-0"} and all(np.abs(x).max() > 0 for x in seen.values())
    assert np.allclose(observed, plain, atol=1e-3)
