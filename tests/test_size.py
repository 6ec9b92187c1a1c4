"""Sizes: integers that remember their polynomial, and its evaluation for another batch."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggraph.size import Size, Sizes, terms_of
from tests.interrupts import interrupted

N, M = Size.variable("n", 12), Size.variable("m", 5)
Step = Callable[[Any, Any, Any], Any]
STEPS: list[Step] = [
    lambda x, n, m: x + 3, lambda x, n, m: 3 + x, lambda x, n, m: x * 4, lambda x, n, m: 4 * x, lambda x, n, m: x + n,
    lambda x, n, m: x * m, lambda x, n, m: n * x, lambda x, n, m: x - m, lambda x, n, m: 7 - x, lambda x, n, m: -x,
    lambda x, n, m: (x * 6) // 6, lambda x, n, m: (x * m) // m]


def evaluate(x: int, **values: int) -> int:
    return int(Sizes([x]).set(values)[0])


def test_a_size_is_an_integer() -> None:
    assert N == 12 and N + 1 == 13 and list(range(N))[-1] == 11 and f"{N}" == "12" and repr(N) == "12=n"
    assert [0] * N == [0] * 12 and {N: 1}[12] == 1                  # type: ignore[index]


@given(st.lists(st.sampled_from(STEPS), max_size=8), st.integers(0, 50), st.integers(1, 50))
def test_a_polynomial_gives_what_the_same_steps_give(steps: list[Step], n: int, m: int) -> None:
    x: Any = N * M + 2
    expected: Any = n * m + 2
    for step in steps:
        x, expected = step(x, N, M), step(expected, n, m)
    assert evaluate(x, n=n, m=m) == expected
    assert evaluate(x, n=12, m=5) == int(x)


def test_what_does_not_depend_on_a_size_is_a_plain_integer() -> None:
    for x in (N - N, N * 0, N // N, (N + 3) - N, (N * M) // (M * N)):
        assert type(x) is int
    assert 0 not in terms_of(N * M - N * M + N).values()


def test_modulo_is_known_where_every_coefficient_is_a_multiple() -> None:
    assert (N * 32) % 32 == 0 and (N * 64 + M * 32) % 32 == 0
    with pytest.raises(TypeError):
        N % 4       # 12 % 4 is 0, but 13 % 4 is not


LOSSES: dict[str, Callable[[], Any]] = {
    "quotient with a rest": lambda: N // 5, "quotient by another size": lambda: N // M, "sum": lambda: N // (M + 1),
    "true division": lambda: N / 2, "division of a number": lambda: 24 / N, "power": lambda: N ** 2,
    "modulo of a number": lambda: 100 % N, "divmod": lambda: divmod(N, 5), "shift": lambda: N << 1,
    "shift down": lambda: N >> 1, "bits": lambda: N & 3, "bits of a number": lambda: 3 | N}


@pytest.mark.parametrize("what", LOSSES)
def test_what_would_lose_the_polynomial_is_refused(what: str) -> None:
    with pytest.raises(TypeError):
        LOSSES[what]()


def test_many_numbers_at_once() -> None:
    numbers = [3, N, N * M, 2 * N * N + M, 0, N - 12]
    assert Sizes(numbers).set({"n": 12, "m": 5}).tolist() == [int(x) for x in numbers]
    assert Sizes(numbers).set({"n": 2, "m": 10}).tolist() == [3, 2, 20, 18, 0, -10]
    assert Sizes([]).set({}).tolist() == []
    with pytest.raises(KeyError):
        Sizes([N]).set({"m": 1})


def test_ctrl_c_at_any_line_leaves_no_half_of_the_sizes() -> None:
    n, m = Size.variable("n", 4), Size.variable("m", 3)
    numbers = [n, 2 * n + 1, n * m, m + 7, 5]
    first, second, last = ({"n": n, "m": m} for n, m in ((2, 3), (1, 1), (3, 2)))
    total = interrupted(lambda: Sizes(numbers).set(first), -1) + 40
    for k in range(1, total):
        sizes = Sizes(numbers)
        sizes.set(first)
        interrupted(lambda sizes=sizes: sizes.set(second), k)       # type: ignore[misc]
        assert sizes.set(last).tolist() == [3, 7, 6, 9, 5], f"Ctrl-C at line {k}"
