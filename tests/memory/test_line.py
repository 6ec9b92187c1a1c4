"""Windows against llama.cpp's rule, lines against sorted lists."""
from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggraph.memory.line import END, KINDS, Line, Window, empty, in_order, joined
from tests.examples import examples

POS = st.integers(0, 30)


def masked(n: int, kind: str, p0: int, p1: int) -> bool:
    """llama.cpp's `is_masked_swa`: a token at p1 does not see p0."""
    if kind == "standard":
        return p1 - p0 >= n
    if kind == "chunked":
        return p0 < (p1 // n) * n
    if kind == "symmetric":
        return abs(p1 - p0) > n // 2
    return False


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("causal", [True, False])
def test_window_reaches_what_llama_cpp_does_not_mask(kind: str, n: int, causal: bool) -> None:
    w = Window(n, kind)
    p1 = np.arange(20, dtype=np.int32)
    for p in p1.tolist():
        seen = [p0 for p0 in range(20) if not masked(n, kind, p0, p) and not (causal and p0 > p)]
        assert [p0 for p0 in range(20) if w.first(p) <= p0 <= w.last(p, causal)] == seen
    assert w.first(p1).tolist() == [w.first(p) for p in p1.tolist()]
    assert w.last(p1, causal).tolist() == [w.last(p, causal) for p in p1.tolist()]
    assert w.first(p1).dtype == w.last(p1, causal).dtype == np.int32


def test_window_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="unknown window type 'ring'; known types: none, standard"):
        Window(3, "ring")
    with pytest.raises(ValueError, match="standard window of 0 positions"):
        Window(0, "standard")


class Plain:
    """A line as a set of (position, cell), and the lost positions as a set."""

    def __init__(self, line: Line, held: set[tuple[int, int]], lost: set[int]):
        self.line, self.held, self.lost = line, held, lost

    def check(self) -> None:
        want = sorted(self.held)
        assert list(zip(self.line.pos.tolist(), self.line.cells.tolist())) == want
        assert (self.line.first, self.line.last) == ((want[0][0], want[-1][0]) if want else (-1, -1))
        assert {p for a, b in self.line.lost for p in range(a, b)} == self.lost
        assert all(a < b for a, b in self.line.lost) and list(self.line.lost) == sorted(self.line.lost)
        assert all(x[1] < y[0] for x, y in pairwise(self.line.lost))
        next_one = self.line.last + 1
        for w in (Window(), Window(3, "standard"), Window(4, "chunked")):
            out_of_sight = all(p < w.first(next_one) for p in self.lost)
            assert self.line.complete(w) == (not self.lost or (bool(want) and out_of_sight))


STEPS = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 5), st.integers(0, 2)),
    st.tuples(st.just("extend"), st.lists(POS, min_size=1, max_size=4)),
    st.tuples(st.just("without"), POS, POS),
    st.tuples(st.just("part"), POS, POS),
    st.tuples(st.just("evicted"), st.integers(1, 4)),
    st.tuples(st.just("add"), POS, POS, st.integers(-9, 9)),
    st.tuples(st.just("div"), POS, POS, st.integers(1, 3)),
)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), STEPS), min_size=1, max_size=20))
def test_lines_are_values(program: list[tuple[int, Any]]) -> None:
    """Any operation on any line made so far gives the right line, and changes none of those that were there."""
    lines = [Plain(empty(), set(), set())]
    cell = 0
    for which, (name, *args) in program:
        p = lines[-1] if which % 3 else lines[which % len(lines)]
        line, held, lost = p.line, p.held, p.lost
        if name in ("append", "extend"):
            pos = [line.last + 1 + args[1] + i for i in range(args[0])] if name == "append" else sorted(args[0])
            cells = list(range(cell, cell + len(pos)))
            cell += len(pos)
            line = line.extend(np.array(cells, np.int32), np.array(pos, np.int32))
            held = held | set(zip(pos, cells))
        elif name == "evicted":
            if args[0] > len(held):
                continue
            line, gone = line.evicted(args[0]), sorted(held)[:args[0]]
            held, lost = held - set(gone), lost | {x for x, _ in gone}
        elif name in ("without", "part"):
            p0, p1 = sorted(args)
            inside = {h for h in held if p0 <= h[0] < p1}, {x for x in lost if p0 <= x < p1}
            held, lost = (held - inside[0], lost - inside[1]) if name == "without" else inside
            line = getattr(line, name)(p0, p1)
        else:
            p0, p1, by = min(args[:2]), max(args[:2]), args[2]
            line = line.moved(p0, p1, (lambda x: x + by) if name == "add" else (lambda x: x // by))     # noqa: B023
            def to(x: int) -> int:
                return x if not p0 <= x < p1 else x + by if name == "add" else x // by      # noqa: B023
            held = {(to(x), c) for x, c in held if to(x) >= 0}
            lost = {to(x) for x in lost if to(x) >= 0}
        lines.append(Plain(line, held, lost))
    for p in lines:
        p.check()


def test_append_is_in_place_and_a_fork_is_not() -> None:
    line = in_order(np.array([3, 1], np.int32), np.array([0, 0], np.int32), ())
    assert line.cells.tolist() == [1, 3]
    grown = line.extend(np.array([5], np.int32), np.array([1], np.int32))
    more = grown.extend(np.array([6], np.int32), np.array([2], np.int32))
    assert more.cells.base is grown.cells.base
    fork = grown.extend(np.array([7], np.int32), np.array([9], np.int32))
    assert fork.cells.base is not grown.cells.base
    assert (grown.cells.tolist(), more.cells.tolist(), fork.cells.tolist()) == ([1, 3, 5], [1, 3, 5, 6], [1, 3, 5, 7])
    assert grown.where(0, END) == slice(0, 3) and grown.where(1, 1) == slice(2, 2)
    assert grown.plus(empty().remembering(((0, 2),))).lost == ((0, 2),)


def test_joined_ranges() -> None:
    assert joined([(5, 7), (0, 2)], [(2, 3), (6, 9)], []) == ((0, 3), (5, 9))
