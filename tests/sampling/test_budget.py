"""A limit on thoughts: wherever the text is cut into tokens, they end in time, and nothing else is changed."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggraph import ReasoningBudget, Sampler, SamplerError
from ggraph.sampling.budget import _whole

PIECES: list[str | bytes] = ["<", "think", ">", "</", "<think>", "</think>", "x", " <th", "ink> ", "é", "stop"]
PIECES += [bytes([b]) for b in range(256)]
BYTES = [p if isinstance(p, bytes) else p.encode() for p in PIECES]
X = PIECES.index("x")


class Vocab:
    n_vocab = len(BYTES)

    def piece(self, id: int) -> bytes:
        return BYTES[id]

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        """The longest piece, again and again."""
        raw, ids = text.encode(), list[int]()
        while raw:
            id = max((i for i in range(len(BYTES)) if raw.startswith(BYTES[i])), key=lambda i: len(BYTES[i]))
            ids.append(id)
            raw = raw[len(BYTES[id]):]
        return ids


def made(budget: int, **options: Any) -> ReasoningBudget:
    return ReasoningBudget(Vocab(), "<think>", ["</think>", "</x>"], budget, **options)


def written(limit: ReasoningBudget, wanted: list[bytes | str]) -> str:
    """What is written where the model wants these pieces one after the other, until all have come."""
    sampler, out = Sampler("temp 0", len(BYTES), grammar=limit), b""
    todo = [PIECES.index(w) for w in wanted]
    while todo:
        row = np.zeros(len(BYTES), np.float32)
        row[todo[0]] = 5
        token = sampler.sample(row)
        if token == todo[0]:
            todo.pop(0)
        sampler.accept(token)
        out += BYTES[token]
    return out.decode(errors="replace")


@pytest.mark.parametrize("start", [["<think>"], ["<", "think", ">"], [" <th", "ink> "]])
def test_thoughts_end_in_time(start: list[bytes | str]) -> None:
    head = "".join(map(str, start))
    assert written(made(3), [*start, *["x"] * 6]) == head + "xxx</think>xxx"
    assert written(made(0), [*start, *["x"] * 2]) == head + "</think>xx"
    assert written(made(3, message="stop"), [*start, *["x"] * 4]) == head + "xxxstop</think>x"
    for end in (["</think>"], ["</", "think", ">"], ["</", "x", ">"]):
        assert written(made(9), [*start, "x", *end, *["x"] * 20]) == head + "x" + "".join(end) + "x" * 20
    assert written(made(-1), [*start, *["x"] * 500]) == head + "x" * 500


def test_outside_of_thoughts_nothing_is_forced() -> None:
    assert written(made(2), ["x"] * 20) == "x" * 20
    assert written(made(2, opened=True), ["x"] * 5) == "xx</think>xxx"
    assert written(made(0, opened=True), ["x"]) == "</think>x"


def test_every_thought_has_a_budget_of_its_own() -> None:
    text = written(made(2), ["<think>", *["x"] * 3, "<think>", "x", "</think>", "<think>", *["x"] * 3])
    assert text == "<think>xx</think>x<think>x</think><think>xx</think>x"


def test_a_character_is_whole() -> None:
    """Its last byte comes even if the budget is spent."""
    euro = [bytes([b]) for b in "€".encode()]
    for budget in (1, 2, 3):
        assert written(made(budget), ["<think>", *euro, "x"]) == "<think>€</think>x"


@given(st.text(max_size=4), st.integers(0, 20))
def test_whole_characters(text: str, n: int) -> None:
    raw = text.encode()[:n]
    try:
        raw.decode()
    except UnicodeDecodeError:
        assert not _whole(raw)
    else:
        assert _whole(raw)


def test_a_thought_can_be_ended_from_outside() -> None:
    limit = made(-1)
    assert not limit.finish()
    for id in (PIECES.index("<think>"), X):
        limit.accept(id)
    assert limit.finish() and not limit.finish()
    assert written(limit, ["x"]) == "</think>x" and not limit.finish()


@pytest.mark.parametrize("marks", [("", ["b"]), ("a", []), ("a", [""]), ("a", ["b", ""])])
def test_marks_that_are_empty(marks: tuple[str, list[str]]) -> None:
    with pytest.raises(SamplerError, match="none of them may be empty"):
        ReasoningBudget(Vocab(), *marks, 1)


def test_clone_and_reset() -> None:
    limit = made(2, opened=True)
    limit.accept(X)
    twin = limit.clone()
    assert written(twin, ["x"] * 2) == "x</think>x" and written(limit, ["x"] * 2) == "x</think>x"
    limit.reset()
    assert written(limit, ["x"] * 3) == "xx</think>x"


class Never:
    """A grammar without x; it must be told of every token."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def accepts(self, token: int) -> bool:
        return token != X

    def mask(self) -> Any:
        return np.arange(len(BYTES)) != X

    def accept(self, token: int) -> None:
        self.seen.append(token)

    def clone(self) -> Never:
        return Never()

    def reset(self) -> None:
        self.seen.clear()


def test_a_grammar_holds_as_well() -> None:
    inner = Never()
    limit = made(2, opened=True, inner=inner)
    sampler = Sampler("temp 0", len(BYTES), grammar=limit)
    row = np.zeros(len(BYTES), np.float32)
    row[X], row[PIECES.index("stop")] = 5, 4
    for _ in range(5):
        sampler.accept(sampler.sample(row))
    assert b"".join(BYTES[i] for i in inner.seen) == b"stopstop</think>stopstop"
    sampler.reset()
    assert not inner.seen
