"""Rows of recurrent state: which row each sequence reads and which it writes next. Bookkeeping only.

In: ubatches and operations on sequences. Out: row numbers. A step never writes the row it reads: it gets spare rows, and
`commit` makes those the sequences' own, so that a rollback has nothing to restore and a branch copies nothing. Row 0 is always
zero (the state of a new sequence), row 1 takes what nobody wants to keep. For models that read n-grams a row also has a tail: the
last tokens before its state.
"""
from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..batch import Ubatch
from ..errors import Error
from .line import END, Array
from .state import State

ZERO, TRASH, N_FIXED = 0, 1, 2
NO_TOKEN = -1                       # in a tail: before the start, or given as an embedding


class Mark(NamedTuple):
    """The state after position `pos` is in `row`."""
    pos: int
    row: int


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Rows of one ubatch with n_seqs sequence sets."""
    src: Array          # int32 [n_seqs] row that each set starts from
    dst: Array          # int32 [n_snapshots, n_seqs] row of the state after the last token, after the one before it, ...


class RecurrentStore:
    """State rows of up to `n_seq_max` sequences, with `n_rollback` earlier states of each kept to go back to, and tails of
    `n_tail` tokens."""
    equal, sequential = True, False

    def __init__(self, n_seq_max: int, n_rollback: int = 0, n_tail: int = 0):
        self.n_seq_max, self.n_snapshots = n_seq_max, n_rollback + 1
        self.n_rows = N_FIXED + 2 * n_seq_max * self.n_snapshots        # what is kept, and as much to write
        self.marks: list[tuple[Mark, ...]] = [()] * n_seq_max           # per sequence, oldest first
        self.tails = np.full((self.n_rows, n_tail), NO_TOKEN, np.int32)
        self._open: list[tuple[Mark, ...]] | None = None

    # --- one step

    def prepare(self, ubatches: Sequence[Ubatch]) -> list[StateSlots]:
        """Rows for each ubatch, as if run one after the other. There are always enough."""
        trial, plan = copy.copy(self), []
        trial.marks = list(self.marks)
        for u in ubatches:
            plan.append(trial._find(u))
            trial._place(u, plan[-1])
        return plan

    def _find(self, u: Ubatch) -> StateSlots:
        used = {m.row for marks in self.marks for m in marks}
        spare = (r for r in range(N_FIXED, self.n_rows) if r not in used)
        kept = min(self.n_snapshots, u.n_seq_tokens)
        src = [marks[-1].row if (marks := self.marks[seqs[0]]) else ZERO for seqs, _ in self._sets(u)]
        dst = [[next(spare) if i < kept else TRASH for _ in src] for i in range(self.n_snapshots)]
        return StateSlots(np.array(src, np.int32), np.array(dst, np.int32))

    def _place(self, u: Ubatch, slots: StateSlots) -> None:
        for i, (seqs, rows) in enumerate(self._sets(u)):
            new = [Mark(int(p), int(r)) for p, r in zip(u.pos[0, rows][::-1], slots.dst[:, i]) if r != TRASH][::-1]
            for s in seqs:
                self.marks[s] = (*self.marks[s], *new)[-self.n_snapshots:]

    @staticmethod
    def _sets(u: Ubatch) -> list[tuple[tuple[int, ...], slice]]:
        """The ubatch's n_seqs runs of n_seq_tokens rows."""
        n = u.n_seq_tokens
        return [(u.seq_ids[i * n], slice(i * n, (i + 1) * n)) for i in range(u.n_seqs)]

    def apply(self, ubatch: Ubatch, slots: StateSlots) -> None:
        assert self._open is None, "the step before this one is still open"
        self._open = list(self.marks)
        self._place(ubatch, slots)
        self._write_tails(self.texts(ubatch, slots), slots)

    def texts(self, u: Ubatch, slots: StateSlots) -> Array:
        """int32 [n_seqs, n_tail + n_seq_tokens]: the tokens of each set, behind those of the row that it starts from."""
        tokens = np.full(u.n_tokens, NO_TOKEN, np.int32) if u.token is None else u.token
        return np.concatenate([self.tails[slots.src], tokens.reshape(u.n_seqs, -1)], axis=1)

    def _write_tails(self, texts: Array, slots: StateSlots) -> None:
        """The tails of the rows written; states that are not kept would end before the text does."""
        n, length = self.tails.shape[1], texts.shape[1]
        for back, rows in enumerate(slots.dst[:length - n]):
            kept = rows != TRASH
            self.tails[rows[kept]] = texts[kept, length - back - n:length - back]

    def commit(self) -> None:
        self._open = None

    def rollback(self) -> None:
        if self._open is not None:
            self.marks, self._open = self._open, None

    def shortage(self, batch: Ubatch) -> str:
        return f"{self.n_rows} state rows"              # `prepare` never refuses

    # --- operations on sequences

    def _without(self, seq: int, p0: int, p1: int) -> tuple[Mark, ...] | None:
        """The marks once positions p0 <= p < p1 are gone; None if no kept state is of just before p0."""
        marks, lo, hi = self.marks[seq], max(p0, 0), END if p1 < 0 else p1
        if not marks or lo > marks[-1].pos or hi <= marks[-1].pos:
            return marks                    # nothing there, or the state after the last position stays what it is
        left = tuple(m for m in marks if m.pos < lo)
        if lo == 0 or (left and left[-1].pos == lo - 1):
            return left
        return None

    def can_seq_rm(self, seq: int, p0: int, p1: int) -> bool:
        return self._without(seq, p0, p1) is not None

    def seq_rm(self, seq: int, p0: int, p1: int) -> bool:
        """Go back to before p0; a range that spares the last position leaves the state as it is."""
        left = self._without(seq, p0, p1)
        if left is None:
            return False
        self.marks[seq] = left
        return True

    def _until(self, seq: int, p1: int) -> tuple[Mark, ...] | None:
        marks = self.marks[seq]
        left = marks if p1 < 0 else tuple(m for m in marks if m.pos < p1)
        whole = len(left) == len(marks) or (left and left[-1].pos == p1 - 1)
        return left if whole else None

    def can_seq_cp(self, src: int, dst: int, p0: int, p1: int) -> bool:
        return p0 <= 0 and self._until(src, p1) is not None

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> bool:
        """`dst` shares the rows of `src`; False for a part from the middle, or up to where no state is kept."""
        left = self._until(src, p1)
        if p0 > 0 or left is None:
            return False
        self.marks[dst] = left
        return True

    def seq_keep(self, seq: int) -> None:
        self.marks = [m if s == seq else () for s, m in enumerate(self.marks)]

    def can_seq_add(self, seq: int, p0: int, p1: int, delta: int) -> bool:
        return all(0 <= m.pos + delta < END for m in self.marks[seq] if m.pos >= p0 and (p1 < 0 or m.pos < p1))

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> bool:
        """A state has no positions of its own: only its label moves."""
        return self._move(seq, p0, p1, lambda p: p + delta) if self.can_seq_add(seq, p0, p1, delta) else False

    def can_seq_div(self, seq: int, p0: int, p1: int, d: int) -> bool:
        return d > 0

    def seq_div(self, seq: int, p0: int, p1: int, d: int) -> bool:
        return self._move(seq, p0, p1, lambda p: p // d) if d > 0 else False

    def _move(self, seq: int, p0: int, p1: int, to: object) -> bool:
        assert callable(to)
        self.marks[seq] = tuple(Mark(to(m.pos), m.row) if m.pos >= p0 and (p1 < 0 or m.pos < p1) else m
                                for m in self.marks[seq])
        return True

    def seq_pos_min(self, seq: int) -> int:
        """The earliest position whose state is kept, -1 for none."""
        return self.marks[seq][0].pos if self.marks[seq] else -1

    def seq_pos_max(self, seq: int) -> int:
        return self.marks[seq][-1].pos if self.marks[seq] else -1

    def seq_same(self, a: int, b: int) -> bool:
        return self.marks[a] == self.marks[b]

    def clear(self) -> None:
        self.marks, self._open = [()] * self.n_seq_max, None

    # --- save and load

    def state(self, seq: int | None = None) -> State:
        """`seq`, `pos`, `cell` [n]: the row of each kept state; `tail` [n, n_tail]."""
        seqs = range(self.n_seq_max) if seq is None else [seq]
        flat = [(s if seq is None else 0, m.pos, m.row) for s in seqs for m in self.marks[s]]
        columns = np.array(flat, np.int32).reshape(-1, 3).T
        return {"seq": columns[0], "pos": columns[1], "cell": columns[2], "tail": self.tails[columns[2]]}

    def can_restore(self, state: State, seq: int | None = None) -> bool:
        self._check(state)
        room = len({int(c) for c in state["cell"]}) <= self.n_rows - N_FIXED - len(self._others(seq))
        last = self.n_seq_max if seq is None else 1
        if room and ((state["seq"] < 0) | (state["seq"] >= last)).any():
            raise Error(f"the saved state names sequences beyond this context's {last} (n_seq_max)")
        return room

    def _others(self, seq: int | None) -> set[int]:
        return set() if seq is None else {m.row for s, marks in enumerate(self.marks) if s != seq for m in marks}

    def _check(self, state: State) -> None:
        """Error if the state is damaged, or of another model."""
        if not {"seq", "pos", "cell", "tail"} <= set(state):
            raise Error("the saved state is damaged: rows of recurrent layers are missing")
        seq, pos, cell, tail = (state[name] for name in ("seq", "pos", "cell", "tail"))
        if any(a.dtype != np.int32 for a in (seq, pos, cell, tail)):
            raise Error("the saved state is damaged: the types of its rows are not int32")
        if seq.ndim != 1 or not seq.shape == pos.shape == cell.shape == tail.shape[:1]:
            raise Error(f"the saved state is damaged: its shapes are {seq.shape}, {pos.shape}, {cell.shape}, {tail.shape}")
        if tail.shape[1:] != self.tails.shape[1:]:
            raise Error(f"the saved state is of another model: it keeps {tail.shape[1:]} tokens of each row")
        if (pos < 0).any() or (pos >= END).any():
            raise Error("the saved state is damaged: it has a position out of range")

    def restore(self, state: State, seq: int | None = None) -> npt.NDArray[np.int32] | None:
        """Rows that the saved states go to; states that were shared stay shared."""
        if not self.can_restore(state, seq):
            return None
        used = self._others(seq)
        spare = (r for r in range(N_FIXED, self.n_rows) if r not in used)
        row_of = {c: next(spare) for c in dict.fromkeys(state["cell"].tolist())}
        marks: dict[int, list[Mark]] = {}
        for s, pos, cell in zip(state["seq"].tolist(), state["pos"].tolist(), state["cell"].tolist()):
            marks.setdefault(s if seq is None else seq, []).append(Mark(pos, row_of[cell]))
        for s in range(self.n_seq_max) if seq is None else [seq]:
            self.marks[s] = tuple(marks.get(s, ()))[-self.n_snapshots:]
        rows = np.array([row_of[c] for c in state["cell"].tolist()], np.int32)
        self.tails[rows] = state["tail"]
        return rows
