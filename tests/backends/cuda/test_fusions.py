"""Fusions of the CUDA backend: results are those of single nodes, and how many launches are left."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import ggraph
from ggraph import ops
from ggraph.dtypes import F16, Q4_K, Q6_K, Q8_0, DType
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
    assert len(many) == 8


def test_for_many_columns_each_product_is_a_launch_with_its_sums() -> None:
    def make(g: Build) -> list[Tensor]:
        x = ops.mul(ops.rms_norm(g.f32(256, 20), 1e-6), g.f32(256))
        return [ops.add(ops.add(linear(g, x, 64), g.f32(64)), g.f32(64, 20)), linear(g, x, 96)]
    fused, plain, few, _ = both(make)
    assert same(fused, plain) and few == ["normalize", "matmul", "matmul"]


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
    assert kernels == ["normalize", "binary", "quantize", "matvec_4"] and np.isfinite(norm).all()


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


# --- models

MODELS = ("llama-dense", "gemma3-dense", "qwen35-dense", "qwen3moe-moe", "gpt-oss-moe", "mamba2-dense")


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
