"""Random programs of decodes, failures and sequence operations on a full store and a window store, beside a plain model."""
from __future__ import annotations

import sys
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggraph.batch import Batch, Ubatch, split_simple, validate
from ggraph.memory import Memory
from ggraph.memory.kv import KVStore
from tests.examples import examples
from tests.memory.model import Twin, check_cells, kv_stores, picture, same

N_SEQ = 3
SEQ = st.integers(0, N_SEQ - 1)
POS = st.integers(-1, 12)
SETS = st.sampled_from([(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)])
OPS = st.one_of(
    st.tuples(st.just("decode"), st.lists(st.one_of(st.tuples(SEQ), SETS), min_size=1, max_size=8), st.just(-1)),
    st.tuples(st.just("decode"), st.lists(st.tuples(SEQ), min_size=1, max_size=12), st.integers(-1, 3)),
    st.tuples(st.just("decode"), st.tuples(SEQ, st.integers(1, 9)).map(lambda x: [(x[0],)] * x[1]), st.integers(-1, 2)),
    st.tuples(st.just("seq_rm"), st.integers(-1, N_SEQ - 1), POS, POS),
    st.tuples(st.just("seq_rm"), SEQ, st.integers(0, 30), st.just(-1)),
    st.tuples(st.just("seq_rm"), SEQ, st.just(-1), st.just(-1)),
    st.tuples(st.just("seq_cp"), SEQ, SEQ, POS, POS),
    st.tuples(st.just("seq_cp"), SEQ, SEQ, st.just(-1), st.just(-1)),
    st.tuples(st.just("seq_keep"), SEQ),
    st.tuples(st.just("shift"), SEQ, st.integers(0, 4), st.integers(1, 4)),
    st.tuples(st.just("seq_add"), SEQ, POS, POS, st.integers(-4, 4)),
    st.tuples(st.just("seq_div"), SEQ, POS, POS, st.integers(1, 3)),
    st.tuples(st.just("save"), st.one_of(st.none(), SEQ)),
    st.tuples(st.just("load"), SEQ),
)


def memories(streams: bool, window: int, kind: str, n_ubatch: int, size: int) -> Memory:
    n_stream = N_SEQ if streams else 1
    small = min(size, window * (1 if streams else N_SEQ) + n_ubatch)
    return Memory([KVStore(size, N_SEQ, n_stream, 4), KVStore(small, N_SEQ, n_stream, 4, window, kind)], N_SEQ, n_ubatch)


def run(twin: Twin, program: list[Any]) -> None:
    """Sequence operations pile up shifts and copies, which the next decode, save or load lets K and V follow."""
    saved: list[Any] = []
    for name, *args in program:
        if name == "decode":
            twin.check()
            twin.decode(*args)
            twin.check()
        elif name == "save":
            saved.append((args[0], twin.save(args[0])))
        elif name == "load" and saved:
            seq, state = saved[-1]
            twin.load(state, None if seq is None else args[0])
        elif name == "shift":       # as a context shift does it
            seq, keep, n = args
            if twin.op("seq_rm", seq, keep, keep + n):
                twin.op("seq_add", seq, keep + n, -1, -n)
        elif name == "seq_keep":
            twin.seq_keep(*args)
        elif name.startswith("seq_"):
            twin.op(name, *args)
        for store in kv_stores(twin.memory):
            check_cells(store)
    twin.check()


@settings(max_examples=examples(150), deadline=None)
@given(st.booleans(), st.integers(1, 6), st.sampled_from(["standard", "chunked", "symmetric"]), st.integers(1, 5),
       st.integers(6, 24), st.lists(OPS, min_size=1, max_size=14))
def test_any_program(streams: bool, window: int, kind: str, n_ubatch: int, size: int, program: list[Any]) -> None:
    run(Twin(memories(streams, window, kind, n_ubatch, size)), program)


def long_program(rnd: Random, n: int = 20) -> list[Any]:
    """Mostly decodes, so that windows give cells away and stores fill up, with everything else between."""
    def seq() -> int:
        return rnd.randrange(N_SEQ)

    def pos() -> int:
        return rnd.randrange(-1, 20)

    sets = [(0,), (1,), (2,), (0, 1), (0, 1, 2)]
    makers: list[tuple[int, Callable[[], Any]]] = [
        (5, lambda: ("decode", [(seq(),)] * rnd.randint(1, 9), -1)),
        (5, lambda: ("decode", [(seq(),) for _ in range(rnd.randint(1, 9))], rnd.choice([-1, -1, 0, 1]))),
        (2, lambda: ("decode", [rnd.choice(sets) for _ in range(rnd.randint(1, 3))], -1)),
        (3, lambda: ("seq_rm", seq(), rnd.randrange(2, 30), -1)),
        (1, lambda: ("seq_rm", rnd.randrange(-1, N_SEQ), pos(), pos())),
        (1, lambda: ("seq_rm", seq(), -1, -1)),
        (3, lambda: ("seq_cp", seq(), seq(), -1, rnd.choice([-1, -1, 10]))),
        (1, lambda: ("seq_cp", seq(), seq(), pos(), pos())),
        (1, lambda: ("seq_keep", seq())),
        (2, lambda: ("shift", seq(), rnd.randrange(4), rnd.randint(1, 4))),
        (1, lambda: ("seq_add", seq(), pos(), pos(), rnd.randint(-4, 4))),
        (1, lambda: ("seq_div", seq(), pos(), pos(), rnd.randint(1, 3))),
        (2, lambda: ("save", rnd.choice([None, seq()]))),
        (2, lambda: ("load", seq())),
    ]
    return [make() for make in rnd.choices([m for _, m in makers], [w for w, _ in makers], k=n)]


@settings(max_examples=examples(250), deadline=None)
@given(st.booleans(), st.integers(1, 6), st.sampled_from(["standard", "chunked", "symmetric"]), st.integers(1, 5),
       st.integers(8, 80), st.integers(0, 2**32))
def test_long_programs(streams: bool, window: int, kind: str, n_ubatch: int, size: int, seed: int) -> None:
    run(Twin(memories(streams, window, kind, n_ubatch, size)), long_program(Random(seed)))


# single cases

def one(size: int, window: int = 0, kind: str = "none", n_seq: int = 1, n_stream: int = 1, n_ubatch: int = 512) -> Twin:
    return Twin(Memory([KVStore(size, n_seq, n_stream, 4, window, kind)], n_seq, n_ubatch))


def store_of(twin: Twin) -> KVStore:
    return kv_stores(twin.memory)[0]


@pytest.mark.parametrize("cut", [-1, 0, 1])
@pytest.mark.parametrize("n", [7, 8, 9, 17])
def test_removal_at_the_edge_of_what_a_window_still_knows(n: int, cut: int) -> None:
    """Window 8 in 12 cells, prompts around the window: a tail may go as long as all that its successor sees is here."""
    twin = one(12, 8, "standard", n_ubatch=4)
    for _ in range(n):
        assert twin.decode([(0,)])
    store = store_of(twin)
    all_here, safe = store.seq_pos_min(0) == 0, store.seq_pos_min(0) + 7
    assert twin.op("seq_rm", 0, safe + cut, -1) == (all_here or cut >= 0)
    twin.check()
    assert twin.op("seq_rm", 0, 0, -1)
    twin.check()
    assert store.seq_pos_max(0) == -1


def test_last_token_of_a_long_prompt_can_be_taken_back() -> None:
    """So a second request for the same prompt runs one token, also with a small window cache."""
    twin = one(16, 8, "standard", n_ubatch=8)
    assert twin.decode([(0,)] * 40)
    assert twin.op("seq_rm", 0, 39, -1)
    assert twin.decode([(0,)])
    twin.check()


def test_context_shift_in_a_window_store() -> None:
    """Keep 4, discard half of the rest, again and again: what the window gave away moves along and stays out of sight."""
    twin = one(24, 8, "standard", n_ubatch=4)
    assert twin.decode([(0,)] * 40)
    for _ in range(5):
        assert twin.op("seq_rm", 0, 4, 22) and twin.op("seq_add", 0, 22, -1, -18)
        assert twin.memory.seq_pos_max(0) == 21
        twin.check()
        assert twin.decode([(0,)] * 18)
        twin.check()


def test_context_shift_that_needs_what_is_gone_is_refused() -> None:
    twin = one(12, 8, "standard", n_ubatch=4)
    assert twin.decode([(0,)] * 40)
    assert twin.op("seq_rm", 0, 4, 35)
    assert not twin.op("seq_add", 0, 35, -1, -31)       # the next token would see position 2
    twin.check()


def test_only_cells_out_of_every_sight_are_given_away() -> None:
    """Cells that two sequences share go when neither sees them, not before; a sequence keeps its last one."""
    twin = one(12, 3, "standard", n_seq=2, n_ubatch=4)
    assert twin.decode([(0, 1)] * 4)
    assert twin.decode([(0,)] * 8)
    assert store_of(twin).cells[0].n_used == 12
    assert twin.decode([(0,)] * 50)
    twin.check()
    assert twin.memory.seq_pos_max(1) == 3 and store_of(twin).seq_pos_min(1) <= 2
    assert twin.decode([(1,)] * 50)
    twin.check()


@pytest.mark.parametrize("kind,window,size,n", [("standard", 1, 5, 3), ("chunked", 4, 8, 6), ("symmetric", 1, 5, 3)])
def test_position_survives_where_a_window_sees_nothing_of_the_past(kind: str, window: int, size: int, n: int) -> None:
    """The store is full for n + 1 tokens: it would have to give away a sequence's last cell."""
    twin = one(size, window, kind, n_seq=2)
    assert twin.decode([(0,)] * (size - 4)) and twin.decode([(1,)] * 4)
    assert not twin.decode([(1,)] * (n + 1)) and twin.decode([(1,)] * n)
    twin.check()
    assert twin.memory.seq_pos_max(0) == size - 5 and twin.decode([(0,)])


def test_rollback_leaves_everything_as_before() -> None:
    twin = one(16, n_seq=2)
    assert twin.decode([(0,), (1,), (0, 1)]) is False and twin.decode([(0, 1), (0,), (1,)])
    before = picture(twin.memory)
    step, = twin.memory.prepare(tokens(twin.memory, [(0,), (1,), (0,)]))
    twin.memory.apply(step)
    assert not same(before, picture(twin.memory))
    twin.memory.rollback()
    assert same(before, picture(twin.memory))
    twin.memory.rollback()      # nothing is open: nothing happens
    assert same(before, picture(twin.memory))


def test_rollback_of_a_step_that_was_interrupted_while_it_opened() -> None:
    """Whatever line an interrupt hits, the counts are right afterwards and the sequence is where it was."""
    hit = 0
    while interrupted_at(hit):
        hit += 1
    assert hit > 15


def interrupted_at(n: int) -> bool:
    twin = one(12, 4, "standard", n_ubatch=4)
    assert twin.decode([(0,)] * 12)
    step, = twin.memory.prepare(tokens(twin.memory, [(0,)] * 3))
    lines = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines
        if event == "line" and frame.f_code.co_name in ("place", "evict", "_disown"):
            lines += 1
            if lines > n:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        twin.memory.apply(step)
        return False
    except KeyboardInterrupt:
        check_cells(store_of(twin))
        assert twin.memory.seq_pos_max(0) == 11 and twin.decode([(0,)] * 4)
        check_cells(store_of(twin))
        return True
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("n_stream", [1, 2])
@pytest.mark.parametrize("call", [("seq_rm", 0, 2, 4), ("seq_rm", 0, 3, -1), ("seq_cp", 0, 1, -1, -1), ("seq_add", 0, 3, -1, -2),
                                  ("seq_add", 0, 0, 5, -2), ("seq_keep", 1), ("clear",)], ids=str)
def test_an_interrupted_operation_leaves_order(n_stream: int, call: tuple[Any, ...]) -> None:
    """Whatever line an interrupt hits: what comes next finds cells in order, and no K that missed a move."""
    for n in range(1000):
        twin = one(12, n_seq=2, n_stream=n_stream)
        assert twin.decode([(0,)] * 6)
        store, lines, before = store_of(twin), 0, sys.gettrace()
        old = [c.pos.copy() for c in store.cells]

        def trace(frame: Any, event: str, arg: Any, n: int = n) -> Any:
            nonlocal lines
            if "ggraph.memory" not in frame.f_globals.get("__name__", ""):
                return None
            lines += event == "line"
            if lines > n:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            getattr(twin.memory, call[0])(*call[1:])
            break
        except KeyboardInterrupt:
            twin.memory.rollback()
        finally:
            sys.settrace(before)
        check_cells(store)
        if not store.has_copies:
            for c, was in zip(store.cells, old):
                assert ((c.pos < 0) | (c.pos - c.shift == was)).all()
        batch = Batch()
        batch.add(0, None, 0)
        assert twin.memory.prepare(validate(batch, 1, 2, 100, twin.memory.seq_pos_max))
    assert n > 15


def tokens(memory: Memory, rows: list[tuple[int, ...]]) -> Ubatch:
    batch = Batch()
    for seqs in rows:
        batch.add(0, None, seqs)
    return validate(batch, 1, memory.n_seq_max, 10**6, memory.seq_pos_max, same=memory.seq_same)


def test_a_plan_of_many_ubatches_changes_nothing_and_counts_them_all() -> None:
    store = KVStore(8, 1, 1)
    batch = tokens(Memory([], 1, 1), [(0,)] * 9)
    assert store.prepare(list(split_simple(batch, 2))) is None
    plan = store.prepare(list(split_simple(batch.take(range(8)), 3)))
    assert plan is not None and [s.cells.tolist() for s in plan] == [[[0, 1, 2]], [[3, 4, 5]], [[6, 7]]]
    assert store.cells[0].n_used == 0 and store.seq_pos_max(0) == -1


def test_extent_is_padded_and_bounded() -> None:
    twin = Twin(Memory([KVStore(600, 2, 2)], 2, 512))
    store = store_of(twin)
    assert store.n_kv([0]) == 256
    assert twin.decode([(1,)] * 256)
    assert (store.n_kv([0]), store.n_kv([1]), store.n_kv([0, 1])) == (256, 256, 256)
    assert twin.decode([(1,)])
    assert store.n_kv([0, 1]) == 512
    assert twin.decode([(1,)] * 256)
    assert store.n_kv([1]) == 600
    assert store.shortage(tokens(twin.memory, [(1,)] * 100)) == "100 tokens of sequence 1 need a cell, 87 of 600 can take one"


def test_streams_are_ranges_and_copies_are_whole() -> None:
    twin = one(16, n_seq=3, n_stream=3, n_ubatch=4)
    assert twin.decode([(0,), (2,), (0,), (2,)])        # no range without sequence 1: two ubatches
    assert not twin.decode([(0, 1)])
    assert twin.decode([(s,) for s in (2, 1, 0)])
    assert twin.op("seq_cp", 0, 1, 0, 2)
    assert store_of(twin).has_copies
    twin.check()
    assert not store_of(twin).has_copies and twin.memory.seq_pos_max(1) == 1
    assert twin.decode([(1,)])
    assert not twin.op("seq_cp", 0, 1, 0, 2)            # would take position 2 of sequence 1 away
    assert twin.op("seq_rm", 1, -1, -1) and twin.op("seq_cp", 0, 1, -1, -1)
    twin.check()


def test_a_copy_of_a_stream_takes_its_pending_shift_along() -> None:
    twin = one(16, n_seq=2, n_stream=2)
    assert twin.decode([(0,)] * 6)
    assert twin.op("seq_rm", 0, 0, 2) and twin.op("seq_add", 0, 2, -1, -2) and twin.op("seq_cp", 0, 1, 1, -1)
    assert twin.op("seq_add", 0, 0, -1, 1)
    twin.check()
    assert twin.decode([(0,), (1,)])


def test_a_copy_of_a_stream_does_not_replace_what_a_window_gave_away() -> None:
    twin = one(8, 4, "standard", n_seq=2, n_stream=2, n_ubatch=4)
    assert twin.decode([(0,), (1,)] * 20)
    first = twin.memory.seq_pos_min(1)
    assert first > 0 and not twin.op("seq_cp", 0, 1, first, -1)
    assert twin.op("seq_cp", 0, 1, -1, -1)
    twin.check()


def test_shift_is_what_k_must_be_rotated_by() -> None:
    store = KVStore(8, 2, 1)
    memory = Memory([store], 2, 8)
    memory.apply(memory.prepare(tokens(memory, [(0,)] * 6))[0])
    memory.commit()
    assert store.seq_div(0, 2, -1, 2) and store.seq_add(0, 0, 2, 10) and not store.seq_div(0, -1, -1, 0)
    assert store.cells[0].pos.tolist() == [10, 11, 11, 11, 2, 2, -1, -1]
    assert store.shifts().tolist() == [[10, 10, 9, 8, -2, -3, 0, 0]] and store.moving() == [0]
    store.shifted()
    assert not store.has_shift and not store.shifts().any() and not store.moving()
    assert store.seq_cp(0, 1, 10, 11)
    assert not store.seq_add(0, -1, -1, 1) and store.seq_add(0, 0, 10, -2)
    assert store.cells[0].order(0).tolist() == [4, 5, 0, 1, 2, 3] and store.cells[0].order(1).tolist() == [0]
    assert not store.seq_add(0, 11, -1, 2**31) and store.seq_add(0, 11, -1, -2**80)
    assert store.seq_pos_max(0) == 10


def test_streams_number() -> None:
    with pytest.raises(ValueError, match="2 streams for 3 sequences"):
        KVStore(8, 3, 2)
