"""The KV cells of one layer group: one pool for all sequences, or a stream of cells for each. Bookkeeping only.

In: ubatches and operations on sequences. Out: the cells that each token's K and V are written to, and which cells each
token sees. `prepare` plans, `apply` opens a step and is the only call of a step that changes anything, `commit` or
`rollback` closes it. It holds no tensors: what happens to K and V is told by `shifts`, `take_copies` and the cells.
"""
from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..batch import Ubatch
from .cells import Cells, visible
from .line import END, Array, Line, Move, Window
from .state import State, restored, save

ONLY = np.zeros(1, np.int32)        # the streams of a store that has one
ONLY.flags.writeable = False
N_PAD = 256             # n_kv is padded to this, so that the graph's sizes change rarely


@dataclass(frozen=True, slots=True)
class Slots:
    """Where one ubatch goes."""
    cells: Array        # int32 [n_stream_used, n_tokens / n_stream_used] cell within its stream, in row order
    streams: Array      # int32 [n_stream_used] physical stream ids, ascending without a gap


class KVStore:
    """`size` cells for `n_seq_max` sequences together (n_stream 1), or for each of them (n_stream = n_seq_max).

    `window` positions of kind `swa_type` (none, standard, chunked, symmetric): cells that none of them reaches any more
    may be given to new tokens. Until then they stay, so that a sequence can be taken back.
    """

    def __init__(self, size: int, n_seq_max: int, n_stream: int, n_pad: int = N_PAD, window: int = 0,
                 swa_type: str = "none"):
        if n_stream not in (1, n_seq_max):
            raise ValueError(f"{n_stream} streams for {n_seq_max} sequences; it is one, or one for each")
        self.size, self.n_seq_max, self.n_stream, self.n_pad = size, n_seq_max, n_stream, n_pad
        self.window, self.swa_type = window, swa_type
        reach = Window(window, swa_type)
        n_seq = n_seq_max // n_stream
        self.cells = [Cells(size, n_seq, reach, seq0=s * n_seq) for s in range(n_stream)]
        self._copies: list[tuple[int, int]] = []
        self._open: Slots | None = None

    @property
    def equal(self) -> bool:
        """Streams want ubatches of sequences with equal length and consecutive ids."""
        return self.n_stream > 1

    sequential = equal

    def stream(self, seq: int) -> int:
        """Where the cells of a sequence are."""
        return seq // self.cells[0].n_seq

    def line(self, seq: int) -> Line:
        """A sequence's cells in the order (position, cell)."""
        cells = self._of(seq)
        return cells.lines[seq - cells.seq0]

    def exclusive(self, seq: int) -> Array:
        """Cells that no other sequence shares."""
        cells = self.line(seq).cells
        alone: Array = cells[self._of(seq).owner[:, cells].sum(0) == 1]
        return alone

    def _of(self, seq: int) -> Cells:
        return self._sound(seq // self.cells[0].n_seq)

    def _sound(self, stream: int) -> Cells:
        """The cells of a stream, in order also where the operation before was interrupted (Ctrl-C)."""
        cells = self.cells[stream]
        if cells.torn:
            cells.mend()
        return cells

    # one step

    def prepare(self, ubatches: Sequence[Ubatch]) -> list[Slots] | None:
        """Cells for all of them, as if run one after the other; None if there are too few. Changes nothing."""
        trial = self if len(ubatches) < 2 else self._trial({self.stream(s) for u in ubatches for s in u.seq.tolist()})
        plan = []
        for i, u in enumerate(ubatches):
            slots = trial._find(u)
            if slots is None:
                return None
            plan.append(slots)
            if i + 1 < len(ubatches):
                trial._place(u, slots)
        return plan

    def _trial(self, streams: set[int]) -> KVStore:
        twin = copy.copy(self)
        twin.cells = [c.copy() if s in streams else c for s, c in enumerate(self.cells)]
        return twin

    def _find(self, u: Ubatch) -> Slots | None:
        streams = u.seq[::u.n_seq_tokens] if self.n_stream > 1 else ONLY
        assert self.n_stream == 1 or (u.seq == np.repeat(streams, u.n_seq_tokens)).all()
        found = []
        for s in streams.tolist():
            cells = self._sound(s).find(u.n_tokens // len(streams))
            if cells is None:
                return None
            found.append(cells)
        return Slots(found[0][None] if len(found) == 1 else np.stack(found), streams)

    def shortage(self, batch: Ubatch) -> str:
        """Why `prepare` gives None: the numbers of the stream that lacks most."""
        need = Counter(self.stream(s) for s in batch.seq.tolist())
        stream = max(need, key=lambda s: need[s] - self.cells[s].n_room())
        whose = "" if self.n_stream == 1 else f" of sequence {stream}"
        return f"{need[stream]} tokens{whose} need a cell, {self.cells[stream].n_room()} of {self.size} can take one"

    def apply(self, ubatch: Ubatch, slots: Slots) -> None:
        """Open a step: the ubatch's tokens own their cells. Cells that a window gave away lose what they held."""
        assert self._open is None, "the step before this one is still open"
        self._open = slots      # first, so that a step which fails in here can be rolled back too
        self._place(ubatch, slots)

    def _place(self, u: Ubatch, slots: Slots) -> None:
        ids = slots.cells.reshape(-1)
        for stream, idx in zip(slots.streams.tolist(), slots.cells):
            self.cells[stream].evict(idx)
        for seqs, rows in u.sets():
            self._of(seqs[0]).place(ids[rows], u.pos[0, rows], seqs)
        for stream, idx in zip(slots.streams.tolist(), slots.cells):
            self.cells[stream].head = int(idx[-1]) + 1

    def commit(self) -> None:
        """Close the step: its tokens stay."""
        self._open = None

    def rollback(self) -> None:
        """Close the step as if it had not been; only cells that a window gave to it are free now."""
        self._mend()
        if self._open is None:
            return
        for stream, idx in zip(self._open.streams.tolist(), self._open.cells):
            self.cells[stream].drop(idx)
        self._open = None

    def _mend(self) -> None:
        for stream in range(self.n_stream):
            self._sound(stream)

    # operations on sequences: positions p0 <= p < p1; p0 < 0: from the start, p1 < 0: to the end

    def can_seq_rm(self, seq: int, p0: int, p1: int) -> bool:
        """Not if the next token would need positions that a window has given away."""
        return self._of(seq).can_remove(seq, *_range(p0, p1))

    def seq_rm(self, seq: int, p0: int, p1: int) -> bool:
        """Take positions out of a sequence; False, and nothing changed, where it cannot be done."""
        if not self.can_seq_rm(seq, p0, p1):
            return False
        self._of(seq).remove(seq, *_range(p0, p1))
        return True

    def can_seq_cp(self, src: int, dst: int, p0: int, p1: int) -> bool:
        """Not if a window gave away what the copy needs, or if copying a stream would replace more than the range."""
        lo, hi = _range(p0, p1)
        if self.stream(src) == self.stream(dst):
            return src == dst or self._of(src).can_share(src, dst, lo, hi)
        rest, part = self.line(dst).without(lo, hi), self.line(src).part(lo, hi)
        return len(rest) == 0 and not rest.lost and part.complete(self._of(src).window)

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> bool:
        """`dst` gets what `src` has there in place of what it had there: shared cells, or a copy between streams."""
        if not self.can_seq_cp(src, dst, p0, p1):
            return False
        lo, hi = _range(p0, p1)
        a, b = self._of(src), self._of(dst)
        if a is b and src != dst:
            a.share(src, dst, lo, hi)
        elif a is not b:
            b.clear()           # before the copy is promised, which overwrites all that is there
            self._copies.append((self.stream(src), self.stream(dst)))
            b.mirror(a, src, dst, lo, hi)
        return True

    def seq_keep(self, seq: int) -> None:
        """Take out all other sequences."""
        for s in range(self.n_seq_max):
            if s != seq:
                self._of(s).remove(s, 0, END)

    def can_seq_add(self, seq: int, p0: int, p1: int, delta: int) -> bool:
        """Not for cells that another sequence owns too, and not if the move brings given-away positions into sight."""
        return self._of(seq).can_move(seq, *_range(p0, p1), _plus(delta))

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> bool:
        """Move positions by delta; those that become negative are removed."""
        if not self.can_seq_add(seq, p0, p1, delta):
            return False
        self._of(seq).move(seq, *_range(p0, p1), _plus(delta))
        return True

    def can_seq_div(self, seq: int, p0: int, p1: int, d: int) -> bool:
        """Not for d < 1, and else as `can_seq_add`."""
        return d > 0 and self._of(seq).can_move(seq, *_range(p0, p1), _over(d))

    def seq_div(self, seq: int, p0: int, p1: int, d: int) -> bool:
        """Divide positions by d."""
        if not self.can_seq_div(seq, p0, p1, d):
            return False
        self._of(seq).move(seq, *_range(p0, p1), _over(d))
        return True

    def seq_pos_min(self, seq: int) -> int:
        """The first position that is still here, -1 for none."""
        return self.line(seq).first

    def seq_pos_max(self, seq: int) -> int:
        """The last position, -1 for none."""
        return self.line(seq).last

    def seq_same(self, a: int, b: int) -> bool:
        """Both own exactly the same cells."""
        x, y = self.line(a), self.line(b)
        return np.array_equal(x.cells, y.cells) and (self.stream(a) == self.stream(b) or not len(x))

    def clear(self) -> None:
        """Forget everything, and what was still to be shifted or copied."""
        for cells in self.cells:
            cells.clear()
        self._copies.clear()
        self._open = None

    # save and load

    def state(self, seq: int | None = None) -> State:
        """Positions and owners of what is in use, of one sequence or of all (`state.save` names the arrays)."""
        self._mend()
        assert not self.has_shift and not self._copies, "K and V have yet to follow; run the pending work first"
        return save(self.cells, seq)

    def can_restore(self, state: State, seq: int | None = None) -> bool:
        self._mend()
        return restored(self.cells, state, seq) is not None

    def restore(self, state: State, seq: int | None = None) -> Array | None:
        """Put a saved state in place of all, or of one sequence: int32 [n], the row each entry's K and V go to.

        Where room is short, entries that no later token sees get row -1. None, and nothing changed, if the others do
        not fit; Error if the state is damaged. A state of streams may come back into one pool, and the other way round.
        """
        assert not self._copies, "a pending copy would overwrite what is restored; run it first"
        done = restored(self.cells, state, seq)
        if done is None:
            return None
        self.cells, rows = done
        return rows

    # what the tensors still have to follow

    @property
    def has_shift(self) -> bool:
        return any(c.has_shift for c in self.cells)

    def shifts(self) -> Array:
        """int32 [n_stream, size]: by how many positions each cell's K is to be rotated, until `shifted` says that it is."""
        return np.stack([c.shift for c in self.cells])

    def shifted(self) -> None:
        """All K is where `shifts` wanted it."""
        for c in self.cells:
            c.shift[:] = 0
            c.has_shift = False

    def moving(self) -> list[int]:
        """Sequences with cells whose K is to be rotated."""
        return [c.seq0 + i for c in self.cells for i in np.flatnonzero(c.owner[:, c.shift != 0].any(1)).tolist()]

    @property
    def has_copies(self) -> bool:
        return bool(self._copies)

    def take_copies(self) -> Iterator[tuple[int, int]]:
        """Streams (from, to) whose K and V are to be copied whole, in this order and before any shift. One is taken when the
        next is asked for, so that a copy that was interrupted is made again."""
        while self._copies:
            yield self._copies[0]
            del self._copies[0]

    # what a graph reads

    def n_kv(self, slots: Slots | Iterable[int]) -> int:
        """The used extent of the streams, padded, at most size: so many cells the graph's K and V views hold."""
        streams = slots.streams.tolist() if isinstance(slots, Slots) else slots
        used = max([self.cells[s].used_max for s in streams])
        return min(self.size, max(1, -(-used // self.n_pad)) * self.n_pad)

    def n_listed(self, ubatch: Ubatch) -> int:
        """How many cells `ordered` lists."""
        return sum(map(len, map(self.line, set(ubatch.seq.tolist()))))

    def mask(self, ubatch: Ubatch, slots: Slots, causal: bool = True) -> npt.NDArray[np.bool_]:
        """bool [n_stream_used, n_tokens / n_stream_used, n_kv]: who sees what."""
        n, n_kv = len(slots.streams), self.n_kv(slots)
        seq, pos = ubatch.seq.reshape(n, -1), ubatch.pos[0].reshape(n, -1)
        return np.stack([visible(self.cells[s], seq[i], pos[i], self.window, self.swa_type, causal, n_kv)
                         for i, s in enumerate(slots.streams.tolist())])


def ordered(store: KVStore, ubatch: Ubatch, slots: Slots, causal: bool) -> tuple[Array, Array]:
    """The mask as lists: int32 [total] rows (stream * size + cell) of one sequence after the other, each by (position, cell);
    and spans int32 [4, n_tokens]: where a token's sequence starts in them; from there, the first that it sees and the one
    after the last; the position of its sequence's first row, so that chunks can be cut at fixed positions."""
    window = store.cells[0].window
    spans = np.empty((4, ubatch.n_tokens), np.int32)
    starts: dict[int, int] = {}
    cells: list[Array] = []
    total = 0
    for seqs, rows in ubatch.sets():
        seq, pos = seqs[0], ubatch.pos[0, rows]
        line = store.line(seq)
        if seq not in starts:
            starts[seq] = total
            first = store.stream(seq) * store.size
            cells.append(line.cells + first if first else line.cells)
            total += len(line)
        spans[0, rows] = starts[seq]
        spans[1, rows] = line.pos.searchsorted(window.first(pos)) if store.window else 0
        spans[2, rows] = line.pos.searchsorted(window.last(pos, causal), "right")
        spans[3, rows] = line.first
    return cells[0] if len(cells) == 1 else np.concatenate(cells), spans


def _plus(delta: int) -> Move:
    delta = max(delta, -END)        # further is as far, and fits an int64
    return lambda p: p + delta


def _over(d: int) -> Move:
    d = min(d, END)
    return lambda p: p // d


def _range(p0: int, p1: int) -> tuple[int, int]:
    lo = min(max(p0, 0), END)
    return lo, END if p1 < 0 else max(lo, min(p1, END))
