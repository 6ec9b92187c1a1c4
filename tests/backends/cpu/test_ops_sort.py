"""Sorting rows: one answer for every row, whatever its ties, infinities and NaN."""
from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ggraph import ops
from ggraph.backends import ref
from tests.backends.cpu.plans import Native, evaluate, tensor

CPU, CPU2, REF = Native(1), Native(2), ref.open()
VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, 3.5, np.inf, -np.inf, np.nan])


@settings(max_examples=60, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=40), st.booleans())
def test_rows_of_few_values(row: list[float], descending: bool) -> None:
    node = ops.argsort(tensor(np.array([row, row[::-1]], np.float32)), descending)
    assert np.array_equal(evaluate(node, CPU2), evaluate(node, REF))
    assert not CPU2.fallback


@settings(max_examples=60, deadline=None)
@given(st.lists(VALUES | st.floats(width=32), min_size=1, max_size=40), st.data())
def test_the_best_k(row: list[float], data: st.DataObject) -> None:
    node = ops.top_k(tensor(np.array(row, np.float32)), data.draw(st.integers(1, len(row))))
    assert np.array_equal(evaluate(node, CPU), evaluate(node, REF))


def test_long_rows() -> None:
    x = np.random.default_rng(15).integers(0, 1000, (3, 20000)).astype(np.float32)
    for node in (ops.argsort(tensor(x)), ops.top_k(tensor(x), 2048), ops.top_k(tensor(x), 20000)):
        assert np.array_equal(evaluate(node, CPU2), evaluate(node, REF))
