"""What is asked (`Batch`), what one graph runs (`Ubatch`), and the two ways to cut the first into the second.

In: tokens or embeddings with positions and sequence ids. Out: `validate` gives the whole batch as one checked `Ubatch`;
the splitters cut that into pieces of at most `n_ubatch` rows. It knows neither cells nor graphs, and changes nothing.
"""
from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, groupby, takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import ArgumentError, BatchError, flags, integer

N_AXES = 4              # position axes of a multi-axis (M-RoPE) model
POS_MAX = 2**31 - 2     # positions and the one after them fit int32

Seqs = tuple[int, ...]  # a sequence set: ascending ids, no id twice


class Batch:
    """Rows to process together: token ids, or embedding vectors, or for next-token prediction ids with hidden states."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Take all rows out."""
        self._token: list[int] = []
        self._embd: list[npt.NDArray[np.float32]] = []
        self._pos: list[int | tuple[int, ...] | None] = []
        self._seqs: list[Seqs] = []
        self._output: list[bool] = []

    def __len__(self) -> int:
        return len(self._seqs)

    def add(self, token: int, pos: int | tuple[int, int, int, int] | None, seq_id: int | Iterable[int],
            output: bool = False, embd: npt.NDArray[np.float32] | None = None) -> None:
        """One token of one sequence, or of several that share it. `pos` None: the next one of its sequence.

        `embd` float32 [n_embd], in all rows or in none: the hidden state of the token before this one, which a context for
        next-token prediction needs.
        """
        if (embd is None) != (not self._embd) and len(self):
            raise BatchError("a batch holds tokens or embeddings, not both; use a second batch")
        row, id = self._row(pos, seq_id), integer("token", token)
        vector = None if embd is None else self._vector(embd)
        self._append(*row, output)
        self._token.append(id)
        if vector is not None:
            self._embd.append(vector)

    def add_embd(self, vector: npt.ArrayLike, pos: int | tuple[int, int, int, int] | None, seq_id: int | Iterable[int],
                 output: bool = False) -> None:
        """Like `add`, with a vector float32 [n_embd] in place of the token."""
        if self._token:
            raise BatchError("a batch holds tokens or embeddings, not both; use a second batch")
        x, row = self._vector(vector), self._row(pos, seq_id)
        self._append(*row, output)
        self._embd.append(x)

    def _vector(self, given: npt.ArrayLike) -> npt.NDArray[np.float32]:
        try:
            x = np.array(given, np.float32)
        except (TypeError, ValueError):
            raise ArgumentError(f"embedding {len(self)} is not a vector of numbers") from None
        if x.ndim != 1 or (self._embd and x.shape != self._embd[0].shape):
            want = f"[{len(self._embd[0])}]" if self._embd else "[n_embd]"
            raise BatchError(f"embedding {len(self)} has shape {list(x.shape)}, expected {want}")
        return x

    def _row(self, pos: Any, seq_id: Any) -> tuple[int | tuple[int, ...] | None, Seqs]:
        if type(seq_id) is int:                                 # nearly always, and an Iterable is slow to tell
            seqs: Seqs = (seq_id,)
        else:
            ids = seq_id if isinstance(seq_id, Iterable) else (seq_id,)
            seqs = tuple(sorted({integer("seq_id", s) for s in ids}))
        if not seqs:
            raise BatchError(f"token {len(self)} belongs to no sequence")
        if pos is None or type(pos) is int:
            return pos, seqs
        if not isinstance(pos, Iterable):
            return integer("pos", pos), seqs
        axes = tuple(integer("pos", p) for p in pos)
        if len(axes) != N_AXES:
            raise BatchError(f"token {len(self)} has {len(axes)} positions; give one, or {N_AXES} to a multi-axis model")
        return axes, seqs

    def _append(self, pos: int | tuple[int, ...] | None, seqs: Seqs, output: Any) -> None:
        if type(output) is not bool:
            flags(output=output)
        self._pos.append(pos)
        self._seqs.append(seqs)
        self._output.append(bool(output))

    def with_all_outputs(self) -> Batch:
        """The same rows, and the result of each is asked for."""
        twin = copy.copy(self)
        twin._output = [True] * len(self)
        return twin

    @property
    def both(self) -> bool:
        """Whether its rows are tokens with an embedding each."""
        return bool(self._token and self._embd)

    @property
    def token(self) -> npt.NDArray[np.int32] | None:
        """int32 [n], None for a batch of embeddings."""
        return None if self._embd and not self._token else np.array(self._token, np.int32)

    @property
    def embd(self) -> npt.NDArray[np.float32] | None:
        """float32 [n, n_embd], None for a batch of tokens alone."""
        return np.stack(self._embd) if self._embd else None

    @property
    def pos(self) -> npt.NDArray[np.int32]:
        """int32 [n_axes, n], n_axes 1 or 4; -1 where the position is left to memory."""
        return _axes([-1 if p is None else p for p in self._pos])

    @property
    def seq_id(self) -> list[Seqs]:
        return list(self._seqs)

    @property
    def output(self) -> npt.NDArray[np.bool_]:
        return np.array(self._output, np.bool_)


def _axes(pos: Sequence[int | tuple[int, ...]]) -> npt.NDArray[np.int32]:
    """[1, n], or [4, n] if any row names its axes; text repeats its position on the first three, as llama.cpp does."""
    if tuple in map(type, pos):
        rows = [p if isinstance(p, tuple) else (p, p, p, 0) for p in pos]
        return np.ascontiguousarray(np.array(rows, np.int32).T)
    return np.array([pos], np.int32)


@dataclass(frozen=True, slots=True)
class Ubatch:
    """What one graph run sees. Rows are ordered by sequence set, then by batch order (in `validate`'s: batch order)."""
    token: npt.NDArray[np.int32] | None     # [n_tokens]
    embd: npt.NDArray[np.float32] | None    # [n_tokens, n_embd]
    pos: npt.NDArray[np.int32]              # [n_axes, n_tokens], n_axes 1 or 4
    seq: npt.NDArray[np.int32]              # [n_tokens] first sequence of each token: decides what it sees
    seq_ids: tuple[Seqs, ...]               # [n_tokens] all sequences of each token
    output: npt.NDArray[np.bool_]           # [n_tokens]
    rows: npt.NDArray[np.int32]             # [n_tokens] row in the batch
    n_seqs: int                             # sequence sets of equal length that the rows consist of; 1: any
    n_seq_tokens: int                       # n_tokens / n_seqs
    n_outputs: int

    @property
    def n_tokens(self) -> int:
        return len(self.seq_ids)

    def sets(self) -> list[tuple[Seqs, slice]]:
        """Each run of rows with one sequence set."""
        return [(seqs, slice(rows.start, rows.stop)) for seqs, rows in _runs(self.seq_ids)]

    def take(self, rows: Sequence[int], n_seqs: int = 1) -> Ubatch:
        """The given rows, in this order."""
        i = np.array(rows, np.intp)
        return Ubatch(
            token=None if self.token is None else self.token[i],
            embd=None if self.embd is None else self.embd[i],
            pos=self.pos[:, i],
            seq=self.seq[i],
            seq_ids=tuple(self.seq_ids[r] for r in rows),
            output=self.output[i],
            rows=self.rows[i],
            n_seqs=n_seqs,
            n_seq_tokens=len(rows) // n_seqs,
            n_outputs=int(self.output[i].sum()),
        )


def validate(batch: Batch, n_vocab: int, n_seq_max: int, n_ctx: int, pos_max: Callable[[int], int], *,
             same: Callable[[int, int], bool] | None = None, n_embd: int | None = None, n_axes: int = 1) -> Ubatch:
    """The whole batch, checked, with every position filled in; BatchError names the row and what was expected.

    `pos_max(seq)` is the last position that memory holds, -1 for none; a sequence must go on right after it (in a
    multi-axis model: anywhere after it). `same(a, b)`: memory holds the same tokens for both, needed of sequences that
    share a new one. `n_ctx` bounds the rows of one sequence.
    """
    if not len(batch):
        raise BatchError("the batch is empty")
    runs = _runs(batch._seqs)
    _check_content(batch, n_vocab, n_embd)
    _check_sequences(runs, n_seq_max, n_ctx)
    _check_sharing(runs, same)
    pos = _positions(batch._pos, runs, pos_max, n_axes)
    return Ubatch(
        token=batch.token, embd=batch.embd, pos=_axes(pos), seq=np.array([s[0] for s in batch._seqs], np.int32),
        seq_ids=tuple(batch._seqs), output=batch.output, rows=np.arange(len(batch), dtype=np.int32),
        n_seqs=1, n_seq_tokens=len(batch), n_outputs=sum(batch._output),
    )


def _check_content(batch: Batch, n_vocab: int, n_embd: int | None) -> None:
    if batch._token and not 0 <= min(batch._token) <= max(batch._token) < n_vocab:
        i, t = next((i, t) for i, t in enumerate(batch._token) if not 0 <= t < n_vocab)
        raise BatchError(f"token {i} has id {t}; the vocabulary has ids 0 to {n_vocab - 1}")
    if batch._embd and n_embd is not None and len(batch._embd[0]) != n_embd:
        raise BatchError(f"the embeddings have {len(batch._embd[0])} values, the model takes {n_embd}")


Runs = list[tuple[Seqs, range]]


def _runs(seq_ids: Sequence[Seqs]) -> Runs:
    """Each run of rows with one sequence set."""
    runs: Runs = []
    start = 0
    for seqs, run in groupby(seq_ids):
        stop = start + len(list(run))
        runs.append((seqs, range(start, stop)))
        start = stop
    return runs


def _check_sequences(runs: Runs, n_seq_max: int, n_ctx: int) -> None:
    n_rows = [0] * n_seq_max
    for seqs, rows in runs:
        for s in seqs:
            if not 0 <= s < n_seq_max:
                raise BatchError(f"token {rows.start} is of sequence {s}; this context has 0 to {n_seq_max - 1} (n_seq_max)")
            if n_rows[s] + len(rows) > n_ctx:
                raise BatchError(f"token {rows[n_ctx - n_rows[s]]} is number {n_ctx + 1} of sequence {s} in this batch; "
                                 f"n_ctx is {n_ctx}")
            n_rows[s] += len(rows)


def _check_sharing(runs: Runs, same: Callable[[int, int], bool] | None) -> None:
    """Sequences may share tokens only while they have the same past: they part once and never join again."""
    company: dict[int, Seqs] = {}       # sequence -> set of its latest token
    for seqs, rows in runs:
        for s in seqs:
            now = company.get(s)
            if now == seqs:
                continue
            if now is not None and not set(seqs) <= set(now):
                raise BatchError(f"token {rows.start} joins sequences {seqs}, but sequence {s} is among {now} by now")
            if now is None and s != seqs[0] and same is not None and not same(seqs[0], s):
                raise BatchError(f"token {rows.start} is shared by sequences {seqs[0]} and {s}, which hold different tokens")
            company[s] = seqs


def _positions(given: Sequence[int | tuple[int, ...] | None], runs: Runs, pos_max: Callable[[int], int],
               n_axes: int) -> list[int | tuple[int, ...]]:
    last: dict[int, int] = {}
    filled: list[int | tuple[int, ...]] = []
    for seqs, rows in runs:
        for s in seqs:
            if s not in last:
                last[s] = pos_max(s)
        follow = range(last[seqs[0]] + 1, last[seqs[0]] + 1 + len(rows))
        if given[rows.start:rows.stop].count(None) == len(rows) and follow[-1] <= POS_MAX:
            _check_position(rows.start, follow[0], seqs, last, n_axes)          # then the others are right as well
            filled += follow
            last.update(dict.fromkeys(seqs, follow[-1]))
            continue
        for i in rows:
            filled.append(_position(i, given[i], seqs, last, n_axes))
            last.update(dict.fromkeys(seqs, _axis0(filled[-1])))
    return filled


def _position(i: int, pos: int | tuple[int, ...] | None, seqs: Seqs, last: dict[int, int], n_axes: int) -> int | tuple[int, ...]:
    """Of row i, checked."""
    if isinstance(pos, tuple) and n_axes == 1:
        raise BatchError(f"token {i} has {len(pos)} positions; this model has one position axis")
    pos = last[seqs[0]] + 1 if pos is None else pos
    _check_position(i, pos, seqs, last, n_axes)
    return pos


def _axis0(pos: int | tuple[int, ...]) -> int:
    return pos[0] if isinstance(pos, tuple) else pos


def _check_position(i: int, pos: int | tuple[int, ...], seqs: Seqs, last: dict[int, int], n_axes: int) -> None:
    axes = pos if isinstance(pos, tuple) else (pos,)
    if min(axes) < 0 or max(axes) > POS_MAX:
        raise BatchError(f"token {i} of sequence {seqs[0]} has position {pos}; positions are 0 to {POS_MAX}")
    for s in seqs:
        if last[s] < 0 or axes[0] == last[s] + 1 or (n_axes > 1 and axes[0] > last[s]):
            continue
        if n_axes > 1 and axes[0] == last[s] and isinstance(pos, tuple):
            raise BatchError(f"token {i} repeats position {last[s]} of sequence {s}: images are not supported")
        raise BatchError(f"token {i} of sequence {s} has position {axes[0]}, but the sequence is at {last[s]}: "
                         f"position {last[s] + 1} must follow (pos=None does that, seq_rm takes positions back)")


Splitter = Callable[[Ubatch, int], Iterator[Ubatch]]


def split_simple(batch: Ubatch, n_ubatch: int) -> Iterator[Ubatch]:
    """Pieces of `n_ubatch` rows in batch order, whatever their sequences."""
    if batch.n_tokens <= n_ubatch and sorted(batch.seq_ids) == list(batch.seq_ids):
        yield batch
        return
    for start in range(0, batch.n_tokens, n_ubatch):
        rows = range(start, min(start + n_ubatch, batch.n_tokens))
        yield batch.take(sorted(rows, key=batch.seq_ids.__getitem__))


def split_equal(batch: Ubatch, n_ubatch: int, sequential: bool = False) -> Iterator[Ubatch]:
    """Pieces in which every sequence set has the same number of rows, as states and streams need it.

    Sets of one piece share no sequence. `sequential`: a piece's sets are single sequences with consecutive ids, so that
    their streams form one range; shared tokens are a BatchError then.
    """
    todo = _rows_by_set(batch)
    while todo:
        sets = (_consecutive if sequential else _disjoint)(todo)[:n_ubatch]
        n = min(n_ubatch // len(sets), *(len(todo[s]) for s in sets))
        yield batch.take([r for s in sorted(sets) for r in todo[s][:n]], len(sets))
        todo = {s: left for s, rows in todo.items() if (left := rows[n:] if s in sets else rows)}


def _rows_by_set(batch: Ubatch) -> dict[Seqs, list[int]]:
    """Sequence set -> its rows, sets in the order of their first row."""
    rows: dict[Seqs, list[int]] = {}
    for r, seqs in enumerate(batch.seq_ids):
        rows.setdefault(seqs, []).append(r)
    return rows


def _disjoint(todo: dict[Seqs, list[int]]) -> list[Seqs]:
    """Sets that share no sequence with an earlier one: what came first runs first."""
    chosen: list[Seqs] = []
    seen: set[int] = set()
    for seqs in todo:
        if seen.isdisjoint(seqs):
            chosen.append(seqs)
        seen.update(seqs)
    return chosen


def _consecutive(todo: dict[Seqs, list[int]]) -> list[Seqs]:
    """The lowest sequence and those whose ids follow without a gap."""
    if shared := next((s for s in todo if len(s) > 1), None):
        raise BatchError(f"sequences {shared} share a token, but each has a stream of its own; use kv_unified=True")
    first = min(todo)[0]
    return list(takewhile(todo.__contains__, ((s,) for s in count(first))))
