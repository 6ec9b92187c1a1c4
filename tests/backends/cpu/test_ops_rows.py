"""Norms and sums of rows: fused results equal those of single nodes, rows depend on themselves alone."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggraph import ops
from ggraph.backends import ref
from ggraph.tensor import Tensor
from tests.backends.cpu.plans import Array, Native, evaluate, tensor
from tests.backends.opcase import nmse

RNG = np.random.default_rng(12)
CPU, CPU2, REF = Native(1), Native(2), ref.open()
NORMS = ("norm", "rms_norm", "l2_norm")


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def fused(name: str, x: Tensor, *after: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(the last node, those before it)"""
    node: Any = ops.OPS[name](x, 1e-6)
    nodes = []
    for op, weight in zip((ops.mul, ops.add), after):
        nodes.append(node)
        node = op(node, weight)
    return node, nodes


@pytest.mark.parametrize("n_after", [1, 2])
@pytest.mark.parametrize("name", NORMS)
def test_scaling_and_shifting_are_fused_without_a_change(name: str, n_after: int) -> None:
    node, before = fused(name, tensor(normal(2, 3, 77)), tensor(normal(77)), tensor(normal(2, 1, 77)))
    node, before = (node, before) if n_after == 2 else (before[1], before[:1])
    result = evaluate(node, CPU)
    assert CPU.n_steps == 1
    assert np.array_equal(result, evaluate(node, CPU, keep=before)) and CPU.n_steps == n_after + 1
    assert np.array_equal(result, evaluate(node, CPU2))
    assert nmse(result, evaluate(node, REF)) < 1e-12


def test_what_only_looks_like_a_scaled_norm_is_not_fused() -> None:
    x = tensor(normal(3, 64))
    y = ops.rms_norm(x, 1e-6)
    for node in (ops.mul(y, y), ops.mul(x, y), ops.mul(y, tensor(normal(3, 1)))):
        assert nmse(evaluate(node, CPU), evaluate(node, REF)) < 1e-12
        assert CPU.n_steps == 2


@pytest.mark.parametrize("shift, n_steps", [(0, 1), (64, 2)])
def test_a_result_over_rows_still_to_be_read_is_not_fused(shift: int, n_steps: int) -> None:
    """The product may stand where the source stood, since that is no longer needed after the norm."""
    memory, weight = tensor(normal(41, 16)), tensor(normal(16))
    node, _ = fused("rms_norm", ops.view(memory, (16, 40), (64,)), weight)
    expected = evaluate(node, REF)
    node.buffer, node.offset = memory.buffer, shift
    assert nmse(evaluate(node, CPU2), expected) < 1e-12
    assert CPU2.n_steps == n_steps


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([*NORMS, "sum_rows", "mean"]), st.integers(1, 200), st.integers(1, 4), st.integers(1, 3))
def test_rows_of_any_length(name: str, n: int, n1: int, n2: int) -> None:
    args = (1e-6,) if name in NORMS else ()
    node = ops.OPS[name](ops.permute(tensor(normal(n1, n2, n)), (0, 2, 1, 3)), *args)
    result = evaluate(node, CPU)
    assert not CPU.fallback
    assert np.allclose(result, evaluate(node, REF), rtol=1e-5, atol=1e-5)
    assert np.array_equal(result, evaluate(node, CPU2))


@pytest.mark.parametrize("name", NORMS)
def test_a_row_is_the_same_alone_and_among_others(name: str) -> None:
    x = normal(7, 333)
    together = evaluate(ops.OPS[name](tensor(x), 1e-6), CPU2)
    for i in range(7):
        assert np.array_equal(evaluate(ops.OPS[name](tensor(x[i:i + 1]), 1e-6), CPU)[0, 0, 0], together[0, 0, i])


def test_rows_of_zeros_and_large_values() -> None:
    x = np.stack([np.zeros(65), np.full(65, 1e-20), np.full(65, 1e15), np.linspace(-1, 1, 65)]).astype(np.float32)
    for name in NORMS:
        node = ops.OPS[name](tensor(x), 1e-6)
        assert np.allclose(evaluate(node, CPU), evaluate(node, REF), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [1, 2, 8, 16, 32, 256])
def test_hadamard_of_any_width(n: int) -> None:
    node = ops.hadamard(tensor(normal(3, 2, 3 * n)), n)
    result = evaluate(node, CPU)
    assert nmse(result, evaluate(node, REF)) < 1e-13
    assert np.array_equal(result, evaluate(node, CPU2))
