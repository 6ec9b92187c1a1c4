"""Products of many columns on the emulated device: tiles by tensor cores and by dp4a, by the library, and grouped by expert."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from ggraph import ops
from ggraph.backends import ref
from ggraph.backends.cuda import Cuda, crossover, ops_matmul, ops_move
from ggraph.backends.cuda.device import Kernel
from ggraph.backends.cuda.emulator import Emulator
from ggraph.dtypes import BF16, F16, F32, Q4_K, Q6_K, Q8_0, DType
from ggraph.tensor import Tensor
from tests.backends.cuda.graphs import run
from tests.backends.opcase import Build, Case, nmse, run_case
from tests.backends.optable import WEIGHTS

QUICK = (Q4_K, Q6_K, Q8_0)                      # both forms of scales, both sizes of blocks
TYPES: list[Any] = [*QUICK, *(pytest.param(t, marks=pytest.mark.slow) for t in WEIGHTS if t.quantized and t not in QUICK)]
Typed = Callable[[str, str, DType], Kernel]


def against_ref(make: Callable[[Build], Tensor], n_tokens: int, tolerance: float) -> None:
    """For each column, so that none is forgotten."""
    case, sizes = Case("mul_mat", "many", make), {"n_tokens": n_tokens, "n_kv": 64}
    cuda = Cuda(Emulator())
    found, expected = run_case(cuda, case, sizes, sizes), run_case(ref.open(), case, sizes, sizes)
    assert nmse(found, expected) < tolerance
    n = found.shape[-1]
    assert max(nmse(a, b) for a, b in zip(found.reshape(-1, n), expected.reshape(-1, n))) < 20 * tolerance
    cuda.close()


def product(g: Build, type: DType, n: int = 70) -> Tensor:
    x = g.f32(512, g.n_tokens)
    return ops.add(ops.mul_mat(g.weight(type, 512, n), x), g.f32(n))


@pytest.mark.parametrize("type", TYPES, ids=str)
@pytest.mark.parametrize("n_tokens", [20, 133])
def test_tiles(type: DType, n_tokens: int) -> None:
    against_ref(lambda g: product(g, type), n_tokens, 3e-4)


@pytest.mark.parametrize("type", QUICK, ids=str)
def test_tiles_without_tensor_cores(type: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    typed: Typed = ops_move.typed
    monkeypatch.setattr(ops_matmul, "typed", lambda *a: typed(*a)._replace(defines=(("TYPE", a[2].name), ("DP4A", "1"))))
    against_ref(lambda g: product(g, type), 20, 3e-4)


@pytest.mark.parametrize("type", QUICK, ids=str)
def test_by_the_library(type: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossover, "LIBRARY", 40)
    against_ref(lambda g: product(g, type), 41, 5e-4)
    _, kernels = run(lambda g: [product(g, type)], {"n_tokens": 41, "n_kv": 64})
    assert kernels == ["quantize", "unpack_bf16", "unpack_bf16", "multiply", "chain"]
    _, kernels = run(lambda g: [product(g, type)], {"n_tokens": 39, "n_kv": 64})
    assert kernels == ["quantize", "matmul_128"]


def test_a_run_with_products_of_the_library_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossover, "LIBRARY", 40)
    cuda, sizes = Cuda(Emulator()), {"n_tokens": 41, "n_kv": 64}
    g = Build(cuda, 1, sizes, sizes)
    node = product(g, Q8_0)
    nodes = [node.src[0], node]
    for n in nodes:
        n.buffer = cuda.alloc(int(n.nbytes))
    plan = cuda.compile(nodes, {node})
    for n_tokens, replays in ((41, 0), (41, 0), (3, 0), (3, 1)):
        plan.resize({"n_tokens": n_tokens, "n_kv": 64})
        plan.run()
        assert cuda.device.counts["replays"] == replays
    cuda.close()


@pytest.mark.parametrize("type", [F16, BF16], ids=str)
def test_weights_of_16_bits_by_the_library(type: DType) -> None:
    against_ref(lambda g: product(g, type), 41, 1e-5)
    _, kernels = run(lambda g: [product(g, type)], {"n_tokens": 41, "n_kv": 64})
    assert kernels == ["copy", "multiply", "chain"]


def grouped(g: Build, type: DType, n_expert: int, n_used: int, b_used: int) -> Tensor:
    x = g.f32(256, b_used, g.n_tokens)
    ids = ops.top_k(g.f32(n_expert, g.n_tokens), n_used)
    return ops.add_id(ops.mul_mat_id(g.any(type, 256, 70, n_expert), x, ids), g.f32(70, n_expert), ids)


@pytest.mark.parametrize(("n_expert", "n_used", "b_used", "wide"), [(6, 2, 1, 100), (6, 2, 2, 100), (40, 3, 1, 1000)])
def test_experts_of_many_tokens(n_expert: int, n_used: int, b_used: int, wide: int) -> None:
    for n_tokens in (12, 110):
        against_ref(lambda g: grouped(g, Q4_K, n_expert, n_used, b_used), n_tokens, 3e-4)
        _, kernels = run(lambda g: [grouped(g, Q4_K, n_expert, n_used, b_used)], {"n_tokens": n_tokens, "n_kv": 64})
        assert kernels[-2:] == ["group", "matmul_id_128" if n_tokens >= wide else "matmul_id_32"]


def test_all_tokens_may_choose_one_expert() -> None:
    def make(g: Build) -> Tensor:
        ids = ops.top_k(ops.add(g.f32(8, g.n_tokens), g.leaf(F32, (8,), np.array([0, 0, 0, 0, 0, 100, 0, 0], np.float32))), 1)
        return ops.mul_mat_id(g.any(Q8_0, 64, 33, 8), g.f32(64, 1, g.n_tokens), ids)
    against_ref(make, 300, 3e-4)


def scaled(g: Build, n_tokens: int, factor: float, spoil: float = 0.0) -> Tensor:
    """A product whose activations have that size; the last of each column is `spoil`, unless that is 0."""
    x = (g.rng.standard_normal((n_tokens, 64)) * factor).astype(np.float32)
    x[:, -1] = spoil or x[:, -1]
    return ops.mul_mat(g.weight(Q8_0, 64, 32), g.leaf(F32, (64, n_tokens), x))


@pytest.mark.parametrize("n_tokens", [1, 40])
def test_activations_of_any_size(n_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 8 bits keep their precision where they are no normal numbers of f16; NaN and infinity are not lost in rounding."""
    monkeypatch.setenv("GGRAPH_REF", "exact")
    for factor in (1e-7, 1.0, 1e9):
        against_ref(partial(scaled, n_tokens=n_tokens, factor=factor), n_tokens, 2e-4)
    cuda = Cuda(Emulator())
    for spoil in (np.nan, np.inf, -np.inf):
        found = run_case(cuda, Case("mul_mat", "spoiled", partial(scaled, n_tokens=n_tokens, factor=1.0, spoil=spoil)))
        assert not np.isfinite(found).any()
    assert not run_case(cuda, Case("mul_mat", "nothing", partial(scaled, n_tokens=n_tokens, factor=1e-38))).any()
    cuda.close()
