"""Elementwise kernels: edges of the functions, broadcasts of odd shapes, results in place of the source, soft caps."""
from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggraph import ops
from ggraph.backend import HostBuffer
from ggraph.backends import ref
from ggraph.backends.cpu.pool import KernelError
from ggraph.dtypes import F32
from ggraph.size import Size
from ggraph.tensor import leaf
from tests.backends.cpu.plans import Array, Native, evaluate, tensor
from tests.backends.opcase import nmse

RNG = np.random.default_rng(11)
CPU, CPU2, REF = Native(1), Native(2), ref.open()
EDGES = np.array([0.0, -0.0, 1e-38, -1e-40, 1e-7, -1e-7, 0.1, -0.3, 1, -1, 3, -3.5, 19.9, 20.1, 88, -88, 104, -150,
                  1e30, -1e30, np.inf, -np.inf, np.nan], np.float32)


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", ops.UNARY)
def test_unary_edges(name: str) -> None:
    """Infinities, NaN, zeros, the smallest and the largest. gelu takes its small values from differences."""
    angle = name in ("sin", "cos")
    edges = EDGES[np.isnan(EDGES) | (np.abs(EDGES) < 1e9)] if angle else EDGES
    x = np.concatenate([edges, np.linspace(-12, 12, 301, dtype=np.float32)])
    node = ops.OPS[name](tensor(x))
    result, expected = evaluate(node, CPU), evaluate(node, REF)
    assert not CPU.fallback
    with np.errstate(invalid="ignore", over="ignore"):
        close = np.asarray(np.isclose(result, expected, 3e-6, 1e-6 if "gelu" in name else 1e-7, equal_nan=True))
    assert close.all(), list(zip(x[~close.reshape(-1)], result[~close], expected[~close]))


@pytest.mark.parametrize("name", [*ops.GLU, "swiglu_oai", "swiglu_clamp"])
def test_gated_edges(name: str) -> None:
    gate, up = (m.reshape(-1).astype(np.float32) for m in np.meshgrid(EDGES[:-3], EDGES[:-3]))
    args = {"swiglu_oai": (1.702, 7.0), "swiglu_clamp": (7.0,)}.get(name, ())
    node = ops.OPS[name](tensor(gate), tensor(up), *args)
    with np.errstate(all="ignore"):
        assert np.allclose(evaluate(node, CPU), evaluate(node, REF), rtol=3e-6, atol=1e-7, equal_nan=True)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["add", "sub", "mul", "div"]),
       st.lists(st.tuples(st.sampled_from([1, 2, 3, 7, 16, 17, 33]), st.sampled_from([1, 2])), min_size=4, max_size=4),
       st.lists(st.booleans(), min_size=4, max_size=4))
def test_broadcasts_of_any_shape(name: str, axes: list[tuple[int, int]], alone: list[bool]) -> None:
    b = [1 if one else n for (n, _), one in zip(axes, alone)]
    a = [n * k for (n, k) in axes]
    node = ops.OPS[name](tensor(normal(*a[::-1])), tensor(normal(*b[::-1])))
    result = evaluate(node, CPU)
    assert not CPU.fallback
    assert np.array_equal(result, evaluate(node, REF)) and np.array_equal(result, evaluate(node, CPU2))


def test_single_elements_beside_single_elements() -> None:
    """Also where rows of several elements have become rows of one, as a plan's sizes shrink."""
    a, b = tensor(normal(2, 1, 1, 1)), tensor(normal(2, 1, 1, 1))
    assert np.array_equal(evaluate(ops.mul(a, b), CPU), evaluate(ops.mul(a, b), REF))
    n = Size.variable("n", 5)
    x, y = leaf(F32, (n, 3), "x"), leaf(F32, (1, 3), "y")
    node = ops.mul(x, y)
    for t in (x, y, node):
        t.buffer = HostBuffer(np.arange(int(t.numel), dtype=np.float32).view(np.uint8))
    plan = CPU.compile([node], {node})
    plan.resize({"n": 1})
    plan.run()
    assert np.array_equal(node.buffer.data.view(np.float32)[:3], [0, 1, 4])


def test_long_rows_are_shared_by_threads() -> None:
    """Chunks of a row, of rows that repeat, and of a flat tensor."""
    for a, b in (((1, 5000), (1, 5000)), ((3, 2500), (1, 2500)), ((2, 3, 1000), (2, 3, 1000)), ((2, 3000), (2, 1))):
        node = ops.mul(tensor(normal(*a)), tensor(normal(*b)))
        assert np.array_equal(evaluate(node, CPU2), evaluate(node, REF))


def test_the_result_may_take_the_place_of_the_source() -> None:
    y, bias = tensor(normal(5, 70)), tensor(normal(70))
    for make in (ops.gelu, lambda x: ops.add(x, y), lambda x: ops.mul(x, bias), lambda x: ops.scale(x, 0.5),
                 lambda x: ops.swiglu(x, y), lambda x: ops.add(x, x)):
        x = tensor(normal(5, 70))
        expected = evaluate(make(x), REF)
        node = make(x)
        node.buffer = x.buffer
        assert nmse(evaluate(node, CPU2), expected) < 1e-13


def test_a_soft_cap_is_one_step_and_the_same() -> None:
    x = tensor(normal(3, 1000) * 40)
    node = ops.scale(ops.tanh(ops.scale(x, 1 / 30)), 30)
    fused = evaluate(node, CPU)
    assert CPU.n_steps == 1
    middle = node.src[0]
    assert middle is not None
    assert np.array_equal(fused, evaluate(node, CPU, keep={middle})) and CPU.n_steps == 3


def test_scales_that_are_no_soft_cap_stay_apart() -> None:
    x = tensor(normal(3, 100))
    for node in (ops.scale(ops.tanh(ops.scale(x, 2.0, 1.0)), 3.0), ops.scale(ops.tanh(ops.scale(x, 2.0)), 3.0, 1.0)):
        assert nmse(evaluate(node, CPU), evaluate(node, REF)) < 1e-12
        assert CPU.n_steps == 3


@pytest.mark.parametrize("bad", [-1, 5, 2 ** 31 - 1])
def test_an_expert_that_is_not_there_is_an_error(bad: int) -> None:
    ids = np.array([[0, 1], [bad, 4]], np.int32)
    with pytest.raises(KernelError):
        evaluate(ops.add_id(tensor(normal(2, 2, 32)), tensor(normal(5, 32)), tensor(ids)), CPU)


@pytest.mark.parametrize("n_used", [2, 3, 4, 5, 8, 9])
def test_experts_are_summed_in_few_steps_and_in_order(n_used: int) -> None:
    experts = tensor(normal(4, n_used, 37))
    parts = [ops.view(experts, (37, 4), (experts.nb[2],), i * experts.nb[1]) for i in range(n_used)]
    node = functools.reduce(ops.add, parts)
    result = evaluate(node, CPU)
    assert CPU.n_steps == -(-(n_used - 1) // 3)
    assert np.array_equal(result, evaluate(node, REF)) and np.array_equal(result, evaluate(node, CPU2))


def test_sums_with_broadcasts_stay_apart() -> None:
    x = tensor(normal(4, 37))
    twice = ops.add(x, x)
    for node in (ops.add(ops.add(x, tensor(normal(37))), tensor(normal(4, 1))), ops.add(twice, twice)):
        assert np.array_equal(evaluate(node, CPU), evaluate(node, REF))
        assert CPU.n_steps == 2
