"""The cuts: llama.cpp's own draws, and plain definitions over a full sort."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggraph.sampling import Sampler, default_chain, order
from ggraph.sampling.state import Random
from tests.sampling.rows import F32, GOLDEN, LETTERS, SMOLLM2, draw, frozen, left

# --- the same tokens as llama.cpp -----------------------------------------------------------------

def golden_rows() -> F32:
    rows = np.random.RandomState(GOLDEN["seed"]).standard_normal((64, 512)).astype(np.float32) * 2
    for i in range(64):
        rows[i, (i * 7) % 40] += 6
        rows[i, (i * 3) % 25] += 5
    return frozen(rows)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda c: c["chain"])
def test_golden(case: dict[str, Any]) -> None:
    assert draw(Sampler(case["chain"], 512, SMOLLM2, dry_breakers=("\n", ":")), golden_rows()) == case["tokens"]


@pytest.mark.parametrize("case", GOLDEN["more"], ids=lambda c: c["chain"])
def test_golden_with_ties_and_long_breakers(case: dict[str, Any]) -> None:
    shape = case["n_draws"], case["n_vocab"]
    rows = np.random.RandomState(case["seed"]).standard_normal(shape).astype(np.float32) * np.float32(2)
    rows[:, :6] += np.float32(3)
    if case["step"]:
        rows = np.round(rows / np.float32(case["step"])) * np.float32(case["step"])
    breakers = tuple("".join("abcdef"[t] for t in tokens) for tokens in case["breakers"])
    assert draw(Sampler(case["chain"], shape[1], LETTERS, dry_breakers=breakers), frozen(rows)) == case["tokens"]


def test_the_generator_is_std_mt19937() -> None:
    rng = Random(5489)
    for _ in range(9999):
        rng._bits.random_raw()
    assert rng._bits.random_raw() == 4123659995     # the C++ standard asks for this 10,000th number


def test_uniform_numbers_stay_below_one() -> None:
    class Ones:
        def random_raw(self) -> int:
            return 2**32 - 1

    rng = Random(1)
    rng._bits = Ones()  # type: ignore[assignment]
    assert rng.uniform() < 1 and rng.uniform_f32() < 1


# --- the cuts, against a full sort ----------------------------------------------------------------

@st.composite
def rows_of_logits(draw: Callable[..., Any]) -> F32:
    n = draw(st.sampled_from([1, 2, 17, 200, 1030, 5000, 20000]))
    row = np.random.default_rng(draw(st.integers(0, 2**32))).standard_normal(n).astype(np.float32) * draw(
        st.sampled_from([0.1, 1.0, 4.0]))
    step = draw(st.sampled_from([0, 0, 0.25]))
    if step:
        row = np.round(row / step) * step
    if draw(st.booleans()):
        row[::3] = -np.inf
    row[draw(st.integers(0, n - 1))] = 1
    return frozen(row)


@settings(max_examples=150, deadline=None)
@given(rows_of_logits(), st.sampled_from([1, 2, 40, 128, 129, 300, 10**6]))
def test_top_k(row: F32, k: int) -> None:
    tokens, logits = left(f"top_k {k}", row)
    assert np.array_equal(logits, np.sort(row)[::-1][:k])
    assert np.array_equal(row[tokens], logits) and len(set(tokens)) == len(tokens) == min(k, len(row))


@settings(max_examples=100, deadline=None)
@given(rows_of_logits(), st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99]))
def test_top_p(row: F32, p: float) -> None:
    tokens, logits = left(f"top_p {p}", row)
    best = np.sort(row)[::-1]
    prob = np.exp(best.astype(float) - best[0])
    reached = np.cumsum(prob / prob.sum())
    assert np.array_equal(logits, best[:len(tokens)]) and np.array_equal(row[tokens], logits)
    # llama.cpp's float32 sums drift: by 2e-4 over these 20,000 values
    assert reached[len(tokens) - 1] > p - 1e-3 and (len(tokens) == 1 or reached[len(tokens) - 2] < p + 1e-3)


@settings(max_examples=100, deadline=None)
@given(rows_of_logits(), st.sampled_from([0.01, 0.05, 0.5, 1.0, 5.0]), st.sampled_from(["", "top_k 50;"]))
def test_min_p(row: F32, p: float, before: str) -> None:
    tokens, logits = left(f"{before}min_p {p}", row)
    kept, _ = left(before, row)
    assert tokens == [t for t in kept if row[t] >= row.max() + np.log(np.float32(p))] or (p > 1 and row[tokens] == [row.max()])
    assert np.array_equal(row[tokens], logits)


def test_min_p_after_a_sort_that_a_penalty_undid() -> None:
    sampler = Sampler("top_k 3;penalties 4 1 5 0;min_p 0.5;dist 1", 4)
    sampler.accept(0)
    assert {sampler.sample(frozen([4, 3.9, 3.8, 0])) for _ in range(50)} == {1, 2}


def test_a_large_vocabulary_is_not_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    descending = order._descending
    monkeypatch.setattr(order, "_descending", lambda x: lengths.append(len(x)) or descending(x))  # type: ignore[func-returns-value]
    row = frozen(np.random.default_rng(1).standard_normal(262144))
    draw(Sampler(default_chain(seed=1, repeat_penalty=1.1), len(row)), frozen([row] * 3))
    assert len(lengths) == 3 and max(lengths) < 200


@pytest.mark.parametrize("n", [5, 50, 300000])
def test_equal_logits_everywhere(n: int) -> None:
    tokens, _ = left("top_k 5", frozen(np.zeros(n)))
    assert len(set(tokens)) == 5
    assert Sampler("top_k 5", n).sample(frozen(np.zeros(n))) == tokens[0]
    assert Sampler("greedy", n).sample(frozen(np.zeros(n))) == 0


def test_xtc_never_leaves_a_banned_token_alone() -> None:
    assert draw(Sampler("xtc 1 0 1;dist 1", 3), frozen([[1, 2, -np.inf]] * 9)) == [0] * 9
