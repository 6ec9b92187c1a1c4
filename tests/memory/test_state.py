"""States go out and come back, between layouts too; damaged ones are refused."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggraph.errors import Error
from ggraph.memory import Memory
from ggraph.memory.kv import KVStore
from tests.examples import examples
from tests.memory.model import Twin, check_cells, picture, same


def twin(n_stream: int = 1, size: int = 32, window: int = 0, n_seq: int = 2) -> Twin:
    kind = "standard" if window else "none"
    return Twin(Memory([KVStore(size, n_seq, n_stream, 4, window, kind)], n_seq, 4))


@pytest.mark.parametrize("n_stream,other", [(1, 2), (2, 1), (1, 1), (2, 2)])
def test_a_pool_and_streams_exchange_states(n_stream: int, other: int) -> None:
    a, b = twin(n_stream), twin(other, size=16)
    assert a.decode([(0,), (1,), (0,), (1,), (0,)]) and b.decode([(1,)] * 7)
    assert b.load(a.save(None), None)
    b.check()
    assert [b.memory.seq_pos_max(s) for s in (0, 1)] == [2, 1]
    assert b.load(a.save(0), 1)
    b.check()
    assert b.decode([(1,), (0,)])


@pytest.mark.parametrize("n", [7, 8, 9, 17])
def test_a_prompt_longer_than_the_window_comes_back_whole(n: int) -> None:
    """What the next token sees is there, and the last token may still be taken back."""
    a = twin(size=12, window=8)
    assert a.decode([(0,)] * n)
    for seq in (None, 0):
        b = twin(size=12, window=8)
        assert b.load(a.save(seq), seq)
        b.check()
        assert b.op("seq_rm", 0, n - 1, -1) and b.decode([(0,)] * 5)


def test_room_is_made_by_leaving_out_what_nobody_sees() -> None:
    a, b = twin(size=32, window=4), twin(size=12, window=4)
    assert a.decode([(0,)] * 30) and b.decode([(1,)] * 3)
    assert b.load(a.save(0), 0)
    b.check()
    assert b.memory.seq_pos_min(0) == 21 and b.memory.seq_pos_min(1) == 0
    assert b.decode([(0,), (1,)])


def test_what_does_not_fit_changes_nothing() -> None:
    a, b = twin(size=32), twin(size=8)
    assert a.decode([(0,)] * 10) and b.decode([(0,), (1,)])
    assert not b.load(a.save(0), 0) and not b.load(a.save(None), None)
    assert b.decode([(0,)])


def test_more_sequences_than_there_are() -> None:
    a, b = twin(n_seq=3), twin(n_seq=2)
    assert a.decode([(0,), (1,)]) and b.load(a.save(None), None)
    assert a.decode([(2,)])
    before = picture(b.memory)
    with pytest.raises(Error, match="3 sequences, this context has 2"):
        b.load(a.save(None), None)
    assert a.decode([(2,)]) and same(before, picture(b.memory))
    assert b.load(a.save(2), 0)
    c = twin(n_stream=2)
    assert b.op("seq_cp", 0, 1, -1, -1)
    with pytest.raises(Error, match="kv_unified=True"):
        c.load(b.save(None), None)


DAMAGE: list[dict[str, Any]] = [
    {"pos": None}, {"pos": np.zeros(3, np.int64)}, {"pos": np.zeros(2, np.int32)}, {"pos": np.array([0, -1, 2], np.int32)},
    {"pos": np.array([0, 1, 2**31 - 1], np.int32)}, {"pos": np.array([0, 2, 1], np.int32)},
    {"owner": np.zeros((1, 3), np.bool_)}, {"owner": np.ones((2, 3), np.bool_)}, {"owner": np.ones(3, np.bool_)},
    {"lost": np.zeros(3, np.int32)}, {"lost": np.array([[1, 0, 2]], np.int32)}, {"lost": np.array([[0, 2, 2]], np.int32)},
    {"lost": np.array([[0, -1, 2]], np.int32)}, {"lost": None},
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(damage: dict[str, Any]) -> None:
    a = twin()
    assert a.decode([(0,)] * 3)
    state, = a.memory.state(0)
    state |= damage
    before = picture(a.memory)
    with pytest.raises(Error, match="the saved state"):
        a.memory.restore([{name: x for name, x in state.items() if x is not None}], 0)
    assert same(before, picture(a.memory))


def test_states_are_one_per_store() -> None:
    with pytest.raises(Error, match="of 0 stores, this context has 1"):
        twin().memory.restore([])


@settings(max_examples=examples(150), deadline=None)
@given(st.data(), st.one_of(st.none(), st.just(1)), st.sampled_from([0, 3]), st.sampled_from([1, 2]))
def test_any_state_is_taken_or_refused(data: st.DataObject, seq: int | None, window: int, n_stream: int) -> None:
    """Whatever well-formed arrays a file may hold: the cells agree with themselves afterwards, or nothing changed."""
    b = twin(n_stream, size=8, window=window)
    assert b.decode([(0,), (1,), (0,)])
    n, n_seq = data.draw(st.integers(0, 10)), 1 if seq is not None else data.draw(st.integers(1, 3))
    small = st.integers(-1, 12)
    state = {
        "pos": np.array(data.draw(st.lists(small, min_size=n, max_size=n)), np.int32),
        "owner": np.array(data.draw(st.lists(st.booleans(), min_size=n * n_seq, max_size=n * n_seq)), np.bool_),
        "lost": np.array(data.draw(st.lists(st.tuples(st.integers(0, n_seq), small, small), max_size=2)), np.int32),
    }
    state["owner"], state["lost"] = state["owner"].reshape(n_seq, n), state["lost"].reshape(-1, 3)
    before, store = picture(b.memory), b.memory.stores[0]
    assert isinstance(store, KVStore)
    try:
        rows = b.memory.restore([state], seq)
    except Error:
        rows = None
    if rows is None:
        assert same(before, picture(b.memory))
    else:
        check_cells(store, whole=seq is not None)
