"""Offsets by lifetime: nothing that is still to be read is overwritten, whatever the graph."""
from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ggraph import ops
from ggraph.backend import open_backend
from ggraph.graph import Graph
from ggraph.inputs import Given
from ggraph.schedule.alloc import ALIGN, Arena
from ggraph.schedule.plan import Plan
from ggraph.tensor import F32, Tensor, leaf


def plan_of(graph: Graph) -> tuple[Plan, Any]:
    backend = open_backend("ref")
    arena = Arena(backend)
    return Plan(graph, [backend], lambda t: None, {backend: arena}), arena


def run(graph: Graph, data: np.ndarray) -> dict[str, np.ndarray]:
    plan, _ = plan_of(graph)
    plan.resize({})
    plan.fill(data)
    plan.run()
    return {name: np.array(plan.array(t)).reshape(-1) for name, t in graph.outputs.items()}


def start() -> tuple[Graph, Tensor]:
    graph, x = Graph(), leaf(F32, (8, 3), "x")
    graph.inputs.append(Given(x))
    return graph, x


def test_a_source_that_is_also_a_view_of_the_other_is_not_overwritten() -> None:
    graph, x = start()
    y = ops.scale(x, 2.0)
    graph.output("out", ops.mul(y, ops.view(y, (8, 1))))
    data = np.arange(24, dtype=np.float32).reshape(3, 8)
    assert np.array_equal(run(graph, data)["out"].reshape(3, 8), 4 * data * data[:1])


def test_what_is_joined_stays_as_long_as_the_whole() -> None:
    graph, x = start()
    part, other = ops.scale(x, 3.0), ops.scale(x, 5.0)
    whole = ops.concat(part, other, 1)
    graph.output("out", ops.add(ops.scale(x, 2.0), ops.view(whole, x.ne)))
    first, second, joined, after = (t for t in graph.nodes if t.op in ("scale", "concat"))
    data = np.ones((3, 8), np.float32)
    assert (run(graph, data)["out"] == 5).all()
    places = sorted((t.offset, t.offset + int(t.nbytes)) for t in (first, second, joined, after))
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(places))


def test_a_chain_runs_in_place_and_an_output_stays() -> None:
    graph, x = start()
    y = ops.scale(x, 3.0)
    graph.output("middle", y)
    for _ in range(5):
        y = ops.scale(y, 2.0)
    graph.output("end", y)
    data = np.ones((3, 8), np.float32)
    out = run(graph, data)
    assert (out["middle"] == 3).all() and (out["end"] == 96).all()
    _, arena = plan_of(graph)
    assert arena.nbytes <= 3 * -(-96 // ALIGN) * ALIGN                     # x, the output in the middle, the chain


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "mul", "scale", "silu", "view"]), st.integers(0, 99), st.integers(0, 99)),
                min_size=1, max_size=25), st.sets(st.integers(0, 24)))
def test_any_graph_computes_what_numpy_computes(program: list[tuple[str, int, int]], kept: set[int]) -> None:
    graph, x = start()
    data = np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 8)
    tensors, values = [x], [data]
    for op, i, j in program:
        a, b = (tensors[k % len(tensors)] for k in (i, j))
        va, vb = (values[k % len(values)] for k in (i, j))
        if op == "view":
            new, value = ops.reshape(a, (8, 3)), va
        elif op in ("scale", "silu"):
            new = ops.scale(a, 0.5) if op == "scale" else ops.silu(a)
            value = va * np.float32(0.5) if op == "scale" else va / (1 + np.exp(-va))
        else:
            new = (ops.add if op == "add" else ops.mul)(a, b)
            value = va + vb if op == "add" else va * vb
        tensors.append(new)
        values.append(value)
    wanted = {f"t{k}": values[k] for k in range(1, len(tensors)) if k - 1 in kept or k == len(tensors) - 1}
    for name in wanted:
        graph.output(name, ops.scale(tensors[int(name[1:])], 1.0))
    out = run(graph, data)
    for name, value in wanted.items():
        assert np.allclose(out[name], value.reshape(-1), rtol=1e-4, atol=1e-5, equal_nan=True), name
