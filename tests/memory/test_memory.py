"""Several stores act as one: all or none."""
from __future__ import annotations

from typing import Any

import pytest

from ggraph.batch import Batch, Ubatch, validate
from ggraph.errors import BatchError, ContextFull
from ggraph.memory import Memory
from ggraph.memory.kv import KVStore
from tests.memory.model import Twin, picture, same


def whole(memory: Memory, *seqs: int) -> Ubatch:
    batch = Batch()
    for s in seqs:
        batch.add(0, None, s)
    return validate(batch, 1, memory.n_seq_max, 10**6, memory.seq_pos_max)


class Stubborn(KVStore):
    """Refuses what it is told to refuse."""
    refuse = ""

    def can_seq_rm(self, seq: int, p0: int, p1: int) -> bool:
        return self.refuse != "seq_rm" and super().can_seq_rm(seq, p0, p1)

    def can_seq_cp(self, src: int, dst: int, p0: int, p1: int) -> bool:
        return self.refuse != "seq_cp" and super().can_seq_cp(src, dst, p0, p1)

    def can_seq_add(self, seq: int, p0: int, p1: int, delta: int) -> bool:
        return self.refuse != "seq_add" and super().can_seq_add(seq, p0, p1, delta)

    def can_seq_div(self, seq: int, p0: int, p1: int, d: int) -> bool:
        return self.refuse != "seq_div" and super().can_seq_div(seq, p0, p1, d)

    def can_restore(self, state: Any, seq: int | None = None) -> bool:
        return self.refuse != "restore" and super().can_restore(state, seq)

    def apply(self, ubatch: Ubatch, slots: Any) -> None:
        if self.refuse == "apply":
            raise KeyboardInterrupt
        super().apply(ubatch, slots)


OPS: list[tuple[str, tuple[int, ...]]] = [
    ("seq_rm", (0, 2, -1)), ("seq_rm", (-1, 1, -1)), ("seq_cp", (0, 1, -1, -1)), ("seq_add", (0, 0, -1, 3)),
    ("seq_div", (0, 0, -1, 2)),
]


@pytest.mark.parametrize("name,args", OPS)
def test_an_operation_is_done_by_all_stores_or_by_none(name: str, args: tuple[int, ...]) -> None:
    last = Stubborn(16, 2, 1)
    memory = Memory([KVStore(16, 2, 1), last], 2, 8)
    twin = Twin(memory)
    assert twin.decode([(0,)] * 5)
    last.refuse = name
    before = picture(memory)
    assert getattr(memory, name)(*args) is False and same(before, picture(memory))
    last.refuse = ""
    assert getattr(memory, name)(*args) is True and not same(before, picture(memory))


def test_restore_and_apply_too() -> None:
    last = Stubborn(16, 2, 1)
    memory = Memory([KVStore(16, 2, 1), last], 2, 8)
    assert Twin(memory).decode([(0,)] * 5)
    states, before = memory.state(), picture(memory)
    last.refuse = "restore"
    assert memory.restore(states) is None and same(before, picture(memory))
    last.refuse = "apply"
    step, = memory.prepare(whole(memory, 0, 1))
    with pytest.raises(KeyboardInterrupt):
        memory.apply(step)
    assert same(before, picture(memory))


def test_a_batch_that_one_store_cannot_take_changes_nothing() -> None:
    memory = Memory([KVStore(16, 2, 1), KVStore(8, 2, 1)], 2, 4)
    assert Twin(memory).decode([(0,)] * 5)
    before = picture(memory)
    with pytest.raises(ContextFull, match="the context is full: 4 tokens need a cell, 3 of 8 can take one"):
        memory.prepare(whole(memory, 0, 1, 0, 1))
    assert same(before, picture(memory))
    assert len(memory.prepare(whole(memory, 0, 1, 0))) == 1


def test_stores_choose_the_split() -> None:
    pool, streams = Memory([KVStore(16, 3, 1)], 3, 4), Memory([KVStore(16, 3, 3)], 3, 4)
    rows = (0, 1, 1, 0, 0, 2)
    assert [s.ubatch.rows.tolist() for s in pool.prepare(whole(pool, *rows))] == [[0, 3, 1, 2], [4, 5]]
    assert [s.ubatch.rows.tolist() for s in streams.prepare(whole(streams, *rows))] == [[0, 1, 5], [3, 2], [4]]
    assert [s.slots[0].streams.tolist() for s in streams.prepare(whole(streams, *rows))] == [[0, 1, 2], [0, 1], [0]]


def test_no_store_only_splits() -> None:
    memory = Memory([], 2, 2)
    steps = memory.prepare(whole(memory, 0, 1, 1))
    assert [s.slots for s in steps] == [(), ()] and memory.seq_pos_max(1) == -1 and memory.seq_pos_min(1) == -1
    for step in steps:
        memory.apply(step)
        memory.commit()
    assert memory.seq_rm(0) and memory.seq_same(0, 1) and memory.state() == []


def test_sequences_that_are_not_there() -> None:
    memory = Memory([KVStore(16, 2, 1)], 2, 4)
    calls: list[Any] = [
        lambda: memory.seq_rm(2), lambda: memory.seq_rm(-2), lambda: memory.seq_cp(0, 2), lambda: memory.seq_cp(-1, 0),
        lambda: memory.seq_keep(5), lambda: memory.seq_add(2, 0, 1, 1), lambda: memory.seq_div(2, 0, 1, 2),
        lambda: memory.seq_pos_max(2), lambda: memory.seq_pos_min(-1), lambda: memory.state(2),
        lambda: memory.restore(memory.state(), 2),
    ]
    for call in calls:
        with pytest.raises(BatchError, match="there is no sequence -?[0-9]; this context has 0 to 1"):
            call()


def test_positions_are_what_every_store_has() -> None:
    memory = Memory([KVStore(32, 2, 1), KVStore(8, 2, 1, window=3, swa_type="standard")], 2, 4)
    twin = Twin(memory)
    assert twin.decode([(0,)] * 20)
    assert (memory.seq_pos_min(0), memory.seq_pos_max(0)) == (12, 19)
    memory.clear()
    assert memory.seq_pos_min(0) == -1 and memory.stores[0].seq_pos_max(0) == -1
