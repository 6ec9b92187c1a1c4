"""Random programs of batches and operations on state rows, beside a plain model: a state is the text that made it.

A row stands for a state and holds the tags of all tokens that went into it, so that a row that leaks, is overwritten while it
is needed, or goes to the wrong sequence shows at the next token.
"""
from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ggraph.batch import Batch, Ubatch, validate
from ggraph.errors import BatchError, Error
from ggraph.memory import Memory, Step
from ggraph.memory.recurrent import N_FIXED, NO_TOKEN, TRASH, ZERO, Mark, RecurrentStore
from ggraph.memory.state import State
from tests.examples import examples

N_SEQ, N_TAIL = 3, 2
Text = tuple[int, ...]
Kept = list[tuple[int, Text]]               # position, text up to it; oldest first

SEQ = st.integers(0, N_SEQ - 1)
POS = st.integers(-1, 9)
SETS = st.sampled_from([(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)])
OPS = st.one_of(
    st.tuples(st.just("decode"), st.lists(st.one_of(st.tuples(SEQ), SETS), min_size=1, max_size=9), st.just(-1)),
    st.tuples(st.just("decode"), st.lists(st.tuples(SEQ), min_size=1, max_size=9), st.integers(-1, 3)),
    st.tuples(st.just("seq_rm"), SEQ, POS, POS),
    st.tuples(st.just("seq_rm"), SEQ, st.integers(0, 20), st.just(-1)),
    st.tuples(st.just("back"), SEQ, st.integers(1, 4)),
    st.tuples(st.just("seq_cp"), SEQ, SEQ, st.integers(-1, 1), POS),
    st.tuples(st.just("seq_keep"), SEQ),
    st.tuples(st.just("seq_add"), SEQ, POS, POS, st.integers(-3, 3)),
    st.tuples(st.just("seq_div"), SEQ, POS, POS, st.integers(1, 3)),
    st.tuples(st.just("save"), st.one_of(st.none(), SEQ)),
    st.tuples(st.just("load"), SEQ),
    st.tuples(st.just("clear")),
)


class Twin:
    def __init__(self, n_rollback: int, n_ubatch: int):
        self.store = RecurrentStore(N_SEQ, n_rollback, N_TAIL)
        self.memory = Memory([self.store], N_SEQ, n_ubatch)
        self.kept: list[Kept] = [[] for _ in range(N_SEQ)]
        self.rows: list[Any] = [None] * self.store.n_rows
        self.rows[ZERO] = ()
        self.n_tags = 0

    def check(self) -> None:
        store = self.store
        assert self.rows[ZERO] == ()
        used = {m.row for marks in store.marks for m in marks}
        assert len(used) <= N_SEQ * store.n_snapshots and not used & {ZERO, TRASH}
        for seq, kept in enumerate(self.kept):
            assert [(m.pos, self.rows[m.row]) for m in store.marks[seq]] == kept[-store.n_snapshots:]
            assert self.memory.seq_pos_max(seq) == (kept[-1][0] if kept else -1)
            for m in store.marks[seq]:
                assert store.tails[m.row].tolist() == tail(self.rows[m.row])

    # --- batches

    def decode(self, sets: Sequence[tuple[int, ...]], n_undo: int = -1) -> None:
        """Tokens of sequence sets; step number `n_undo` is rolled back and ends it."""
        batch = Batch()
        for seqs in sets:
            batch.add(self.n_tags, None, seqs)
            self.n_tags += 1
        try:
            whole = validate(batch, 10**6, N_SEQ, 10**6, self.memory.seq_pos_max, same=self.memory.seq_same)
        except BatchError:
            return
        before = copy.deepcopy((self.store.marks, self.store.tails.tolist()))
        steps = self.memory.prepare(whole)
        assert before == (self.store.marks, self.store.tails.tolist())
        for i, step in enumerate(steps):
            marks = list(self.store.marks)
            self.memory.apply(step)
            self.write(step)
            if i == n_undo:
                self.memory.rollback()
                assert self.store.marks == marks
                break
            self.memory.commit()
            self.grow(step.ubatch)

    def write(self, step: Step) -> None:
        """What kernels do: read the row of each set, write those of the states after its last tokens."""
        u, slots = step.ubatch, step.slots[0]
        assert u.token is not None
        n, read = u.n_seq_tokens, set(slots.src.tolist())
        written = slots.dst[slots.dst != TRASH].tolist()
        assert len(set(written)) == len(written) and not set(written) & (read | {ZERO})
        assert not set(written) & {m.row for marks in (self.store._open or []) for m in marks}
        old = [self.rows[row] for row in slots.src]
        texts = self.store.texts(u, slots)
        for i in range(u.n_seqs):
            tokens = u.token[i * n:(i + 1) * n].tolist()
            kept = self.kept[int(u.seq[i * n])]
            assert old[i] == (kept[-1][1] if kept else ())
            assert texts[i].tolist() == tail(old[i]) + tokens
            for back, row in enumerate(slots.dst[:, i].tolist()):
                assert (row == TRASH) == (back >= n)
                self.rows[row] = (*old[i], *tokens[:n - back]) if row != TRASH else "anything"

    def grow(self, u: Ubatch) -> None:
        assert u.token is not None
        for i, seqs in enumerate(u.seq_ids):
            for s in seqs:
                text = self.kept[s][-1][1] if self.kept[s] else ()
                self.kept[s].append((int(u.pos[0, i]), (*text, int(u.token[i]))))

    # --- operations, as they should be

    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        kept, lo = self.kept[seq], max(p0, 0)
        if not kept or lo > kept[-1][0] or 0 <= p1 <= kept[-1][0]:
            assert self.memory.seq_rm(seq, p0, p1)          # the last state stays what it is
            return
        left = [k for k in kept[-self.store.n_snapshots:] if k[0] < lo]
        possible = lo == 0 or (bool(left) and left[-1][0] == lo - 1)
        assert self.memory.seq_rm(seq, p0, p1) == possible
        if possible:
            self.kept[seq] = left if lo else []

    def back(self, seq: int, n: int) -> None:
        """The last n tokens are taken back: what a rejected draft needs."""
        kept = self.kept[seq]
        states = kept[-self.store.n_snapshots:]
        if n <= len(states) and [p for p, _ in states] == list(range(states[-1][0] - len(states) + 1, states[-1][0] + 1)):
            done = self.memory.seq_rm(seq, states[-1][0] - n + 1, -1)
            assert done == (n < len(states) or states[0][0] == 0)
            if done:
                self.kept[seq] = states[:-n]                # older states were not kept: going back brings none of them

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        kept = self.kept[src][-self.store.n_snapshots:]
        left = kept if p1 < 0 else [k for k in kept if k[0] < p1]
        possible = p0 <= 0 and (left == kept or (bool(left) and left[-1][0] == p1 - 1))
        assert self.memory.seq_cp(src, dst, p0, p1) == possible
        if possible:
            self.kept[dst] = list(left)

    def seq_keep(self, seq: int) -> None:
        self.memory.seq_keep(seq)
        self.kept = [k if s == seq else [] for s, k in enumerate(self.kept)]

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        kept = self.kept[seq][-self.store.n_snapshots:]
        moved = [(p + delta if p >= p0 and (p1 < 0 or p < p1) else p, text) for p, text in kept]
        possible = all(p >= 0 for p, _ in moved)
        assert self.memory.seq_add(seq, p0, p1, delta) == possible
        if possible:
            self.kept[seq] = moved

    def seq_div(self, seq: int, p0: int, p1: int, d: int) -> None:
        assert self.memory.seq_div(seq, p0, p1, d)
        kept = self.kept[seq][-self.store.n_snapshots:]
        self.kept[seq] = [(p // d if p >= p0 and (p1 < 0 or p < p1) else p, text) for p, text in kept]

    def clear(self) -> None:
        self.memory.clear()
        self.kept = [[] for _ in range(N_SEQ)]

    # --- save and load

    def save(self, seq: int | None) -> Any:
        state, = self.memory.state(seq)
        content = [self.rows[row] for row in state["cell"].tolist()]
        return state, content, copy.deepcopy(self.kept if seq is None else self.kept[seq])

    def load(self, saved: Any, seq: int | None) -> None:
        state, content, kept = saved
        places = self.memory.restore([state], seq)
        if places is None:
            return
        for row, text in zip(places[0].tolist(), content):
            self.rows[row] = text
        if seq is None:
            self.kept = copy.deepcopy(kept)
        else:
            self.kept[seq] = list(kept)


def tail(text: Text) -> list[int]:
    return [NO_TOKEN] * max(N_TAIL - len(text), 0) + list(text[-N_TAIL:])


@settings(max_examples=examples(200), deadline=None)
@example(1, 1, [("decode", [(0,), (0,), (0,)], -1), ("back", 0, 1)])
@given(st.integers(0, 3), st.integers(1, 6), st.lists(OPS, min_size=1, max_size=16))
def test_any_program(n_rollback: int, n_ubatch: int, program: list[Any]) -> None:
    twin, saved = Twin(n_rollback, n_ubatch), None
    for name, *args in program:
        if name == "save":
            saved = args[0], twin.save(args[0])
        elif name == "load":
            if saved is not None:
                seq, state = saved
                twin.load(state, None if seq is None else args[0])
        else:
            getattr(twin, name)(*args)
        twin.check()


def test_a_new_sequence_starts_from_zeros_whoever_had_its_row_before() -> None:
    twin = Twin(0, 8)
    for _ in range(20):
        twin.decode([(0,), (1,), (2,)] * 2)
        twin.seq_rm(1, -1, -1)
        step, = twin.memory.prepare(validate(batch(1), 10, N_SEQ, 99, twin.memory.seq_pos_max))
        assert step.slots[0].src.tolist() == [ZERO]
        twin.check()


def test_a_branch_copies_nothing() -> None:
    twin = Twin(1, 8)
    twin.decode([(0,)] * 5)
    assert twin.memory.seq_cp(0, 1)
    assert twin.store.marks[0] == twin.store.marks[1] and twin.memory.seq_same(0, 1)
    twin.kept[1] = list(twin.kept[0])
    twin.decode([(0,), (1,)])
    twin.check()


def test_a_saved_state_that_is_damaged_or_foreign_is_refused_and_changes_nothing() -> None:
    twin = Twin(1, 8)
    twin.decode([(0,)] * 5 + [(1,)] * 2)
    state = twin.store.state()
    marks, tails = list(twin.store.marks), twin.store.tails.copy()
    bad: State
    for bad in ({k: v for k, v in state.items() if k != "pos"}, state | {"cell": state["cell"][:-1]},
                state | {"seq": state["seq"] + N_SEQ}, state | {"pos": state["pos"] - 100},
                state | {"pos": state["pos"] + 0.5}, state | {"tail": state["tail"][:, :1]}):
        with pytest.raises(Error):
            twin.store.restore(bad)
        assert twin.store.marks == marks and np.array_equal(twin.store.tails, tails)


def test_more_states_than_there_are_rows_are_refused() -> None:
    many, few = RecurrentStore(6), RecurrentStore(2)
    many.marks = [(Mark(3, N_FIXED + s),) for s in range(6)]
    assert not few.can_restore(many.state()) and few.restore(many.state()) is None


def test_a_position_beyond_all_is_refused() -> None:
    store = RecurrentStore(1)
    store.marks = [(Mark(3, N_FIXED),)]
    assert not store.seq_add(0, 0, -1, 2**31 - 4) and store.marks == [(Mark(3, N_FIXED),)]
    assert store.seq_add(0, 0, -1, 2**31 - 5) and store.marks == [(Mark(2**31 - 2, N_FIXED),)]


def batch(seq: int) -> Batch:
    b = Batch()
    b.add(0, None, seq)
    return b
