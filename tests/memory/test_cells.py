"""Where new tokens go, and who sees whom."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggraph.memory.cells import Cells, visible
from ggraph.memory.line import KINDS, Array, Window
from tests.examples import examples
from tests.memory.test_line import masked

NONE = Window()


def ints(*values: int) -> Array:
    return np.array(values, np.int32)


def put(cells: Cells, at: Array, pos0: int, *seqs: int) -> None:
    cells.place(at, np.arange(pos0, pos0 + len(at), dtype=np.int32), seqs)
    cells.head = int(at[-1]) + 1


def found(cells: Cells, n: int) -> list[int] | None:
    at = cells.find(n)
    return None if at is None else at.tolist()


def test_free_cells_are_taken_in_turn_then_side_by_side_then_anywhere() -> None:
    c = Cells(10, 2, NONE)
    put(c, c.find(4), 0, 0)                             # type: ignore[arg-type]
    assert found(c, 3) == [4, 5, 6]
    put(c, c.find(4), 0, 1)                             # type: ignore[arg-type]
    assert found(c, 2) == [8, 9]
    c.remove(0, 1, 4)                                   # free: 1 2 3 8 9
    assert c.head == 1 and found(c, 3) == [1, 2, 3]
    put(c, ints(2), 7, 0)                               # free: 1 3 8 9
    assert found(c, 2) == [8, 9]
    assert found(c, 3) == [3, 8, 9]                     # no run of three: from head 3 on
    c.head = 9
    assert found(c, 2) == [8, 9]                        # the only run
    assert found(c, 3) == [1, 3, 8] and found(c, 4) == [1, 3, 8, 9]
    c.head = 4
    assert found(c, 3) == [1, 8, 9]                     # from head on and round, in order
    assert found(c, 5) is None and c.n_room() == 4


def test_search_starts_over_when_enough_is_free_before_the_head() -> None:
    c = Cells(100, 1, NONE)
    put(c, np.arange(50, 60, dtype=np.int32), 0, 0)
    assert found(c, 2) == [0, 1]                        # head 60 is more than 10 used + 2 * 2
    c.head = 14
    assert found(c, 2) == [14, 15]


def test_extent_follows_the_highest_cell() -> None:
    c = Cells(10, 1, NONE)
    put(c, ints(2, 7, 5), 0, 0)
    assert (c.n_used, c.used_max, c.order(0).tolist()) == (3, 8, [2, 7, 5])
    c.remove(0, 1, 2)
    assert (c.n_used, c.used_max, c.order(0).tolist()) == (2, 6, [2, 5])
    c.remove(0, 0, 9)
    assert (c.n_used, c.used_max) == (0, 0)


def test_the_longest_out_of_sight_go_first() -> None:
    """Sequence 0 ends at 9 and sees from 8 on, sequence 1 at 2 and sees from 1 on."""
    c = Cells(13, 2, Window(3, "standard"))
    put(c, np.arange(10, dtype=np.int32), 0, 0)
    put(c, ints(10, 11, 12), 0, 1)
    assert c.unseen().tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 10]
    assert found(c, 2) == [0, 1] and c.n_room() == 9
    c.remove(0, 4, 5)
    assert found(c, 3) == [0, 1, 4]
    c.evict(ints(3))        # and all before it
    assert (c.line(0).first, c.line(0).lost, c.n_used) == (5, ((0, 4),), 8)


@settings(max_examples=examples(200), deadline=None)
@given(st.data(), st.sampled_from(KINDS), st.integers(1, 5), st.booleans(), st.integers(0, 3))
def test_visible_is_llama_cpps_rule(data: st.DataObject, kind: str, n: int, causal: bool, seq0: int) -> None:
    c = Cells(12, 3, Window(n, kind), seq0)
    for cell in data.draw(st.lists(st.integers(0, 11), unique=True)):
        seqs = data.draw(st.sets(st.integers(seq0, seq0 + 2), min_size=1))
        c.place(ints(cell), ints(data.draw(st.integers(0, 15))), sorted(seqs))
    tokens = data.draw(st.lists(st.tuples(st.integers(seq0, seq0 + 2), st.integers(0, 15)), min_size=1))
    n_kv = data.draw(st.integers(1, 12))
    seq, pos = np.array(tokens, np.int32).T
    seen = visible(c, seq, pos, n, kind, causal, n_kv)
    assert seen.shape == (len(tokens), n_kv)
    for i, (s, p1) in enumerate(tokens):
        for j in range(n_kv):
            p0 = int(c.pos[j])
            want = c.owner[s - seq0, j] and not (causal and p0 > p1) and not masked(n, kind, p0, p1)
            assert seen[i, j] == want


def test_clear_and_copy() -> None:
    c = Cells(4, 1, NONE)
    put(c, ints(0, 1), 0, 0)
    twin = c.copy()
    put(twin, ints(2), 2, 0)
    twin.remove(0, 0, 1)
    assert c.pos.tolist() == [0, 1, -1, -1] and c.order(0).tolist() == [0, 1]
    put(c, ints(3), 2, 0)
    assert twin.order(0).tolist() == [1, 2] and c.order(0).tolist() == [0, 1, 3]
    c.clear()
    assert (c.n_used, c.used_max, c.head, len(c.order(0))) == (0, 0, 0, 0) and not c.owner.any()


@pytest.mark.parametrize("n", [0, 1, 4])
def test_replace_takes_what_fits(n: int) -> None:
    """Of ten saved positions under a window of 3, the first may be left out, the last four or so may not."""
    c = Cells(6, 2, Window(3, "standard"))
    put(c, np.arange(n, dtype=np.int32), 0, 1) if n else None
    at = c.replace(0, np.arange(10, dtype=np.int32), ())
    room = 6 - n + max(0, n - 2)        # sequence 1 needs its last two
    assert at is not None and (at < 0).tolist() == [True] * (10 - room) + [False] * room
    assert c.line(0).lost == (((0, 10 - room),) if room < 10 else ())
    assert c.line(0).complete(c.window)
