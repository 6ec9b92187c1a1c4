"""The cells of one stream: which position and which sequences each holds. No tensors.

In: positions and sequence ids of tokens, operations on sequences. Out: free cells, the cells of a sequence in position
order, who sees whom. `pos` and `owner` are the definition; the lines say the same in order, and both change together.
"""
from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .line import END, Array, Line, Move, Ranges, Window, empty, in_order, joined


class Cells:
    """Cells of the sequences `seq0` to `seq0 + n_seq - 1`. A cell without an owner is free, and has position -1.

    `torn` is set while an operation on sequences is at work: who finds it set afterwards (Ctrl-C) calls `mend`.
    """

    def __init__(self, size: int, n_seq: int, window: Window, seq0: int = 0):
        self.size, self.n_seq, self.window, self.seq0 = size, n_seq, window, seq0
        self.clear()

    def clear(self) -> None:
        self.torn = True
        self.owner = np.zeros((self.n_seq, self.size), np.bool_)
        self.pos = np.full(self.size, -1, np.int32)
        self.shift = np.zeros(self.size, np.int32)      # how far positions moved since K was last rotated
        self.has_shift = False
        self.lines = [empty() for _ in range(self.n_seq)]
        self.head = 0           # where the search for free cells starts
        self.n_used = 0
        self.used_max = 0       # highest used cell + 1
        self.torn = False

    def copy(self) -> Cells:
        """A twin to try things on."""
        twin = copy.copy(self)
        twin.pos, twin.owner, twin.shift = self.pos.copy(), self.owner.copy(), self.shift.copy()
        twin.lines = list(self.lines)
        return twin

    def line(self, seq: int) -> Line:
        return self.lines[seq - self.seq0]

    def order(self, seq: int) -> Array:
        """int32 [n]: the cells of a sequence by (position, cell)."""
        return self.line(seq).cells

    # finding and filling

    def find(self, n: int) -> Array | None:
        """n cells for new tokens, ascending: free ones, side by side if possible, else also those longest out of sight.

        None if there are too few. Changes nothing.
        """
        head = self.head if self.head + n <= min(self.size, self.n_used + 3 * n) else 0
        if head + n <= self.size and _highest(self.pos[head:head + n]) < 0:
            return np.arange(head, head + n, dtype=np.int32)
        if self.size - self.n_used < n:
            unseen = self.unseen()[:n - (self.size - self.n_used)]
            cells = np.concatenate([self._free(), unseen])
            return np.sort(cells) if len(cells) == n else None
        return _side_by_side(self._free(), n, head)

    def n_room(self) -> int:
        """How many new tokens would find a cell."""
        return self.size - self.n_used + len(self.unseen())

    def unseen(self) -> Array:
        """int32: used cells that no later token of any of their sequences sees, longest out of sight first.

        Never a sequence's last cell: it alone tells how far the sequence has come.
        """
        if self.window.kind == "none":
            return np.zeros(0, np.int32)
        age = np.full(self.size, END, np.int32)
        for line in self.lines:
            seen_from = min(self.window.first(line.last + 1), line.last)
            age[line.cells] = np.minimum(age[line.cells], seen_from - line.pos)
        unseen = _where((self.pos >= 0) & (age > 0))
        return unseen[np.argsort(-age[unseen], kind="stable")]

    def _free(self) -> Array:
        return _where(self.pos < 0)

    def place(self, cells: Array, pos: Array, seqs: Sequence[int]) -> None:
        """Give free cells, ascending, to tokens of one sequence set, positions ascending."""
        self.pos[cells] = pos
        self.n_used += len(cells)
        self.used_max = max(self.used_max, _highest(cells) + 1)
        for s in seqs:
            i = s - self.seq0
            self.owner[i, cells] = True
            self.lines[i] = self.lines[i].extend(cells, pos)

    def load(self, cells: Array, pos: Array, owner: npt.NDArray[np.bool_], lost: Sequence[Ranges]) -> None:
        """Fill the first cells of an empty stream with saved ones: owner [n_seq, n], each sequence's lost positions."""
        self.pos[cells], self.owner[:, cells] = pos, owner
        self.n_used, self.used_max = len(cells), int(cells.max(initial=-1)) + 1
        self.lines = [in_order(cells[own], pos[own], gone) for own, gone in zip(owner, lost)]

    def replace(self, seq: int, pos: Array, lost: Ranges) -> Array | None:
        """Saved positions, ascending, in place of what a sequence has: int32 [n] the cell of each.

        Where room is short, first ones that no later token sees get cell -1. None if the others do not fit.
        """
        self.remove(seq, 0, END)
        over = max(0, len(pos) - self.n_room())
        cells = self.find(len(pos) - over)
        assert cells is not None
        if len(cells):
            self.evict(cells)
            self.place(cells, pos[over:], (seq,))
        i = seq - self.seq0
        self.lines[i] = self.lines[i].remembering(joined(lost, ((p, p + 1) for p in pos[:over].tolist())))
        return np.r_[np.full(over, -1, np.int32), cells] if self.lines[i].complete(self.window) else None

    def evict(self, cells: Array) -> None:
        """Free those cells that are in use, for they will be overwritten, and all that comes before them in a sequence.

        So a sequence's positions stay without a gap, and its first one tells what a window still knows.
        """
        if _highest(self.pos[cells]) < 0:
            return
        for i in np.flatnonzero(self.owner[:, cells].any(1)).tolist():
            line = self.lines[i]
            n = line.where(0, int(self.pos[cells[self.owner[i, cells]]].max()) + 1).stop
            self.lines[i] = line.evicted(n)
            self._disown(i, line.cells[:n])

    def drop(self, cells: Array) -> None:
        """Free cells as if their tokens had never been, however far `evict` and `place` had come.

        So all else is made anew from the definition; it is done seldom.
        """
        self.owner[:, cells] = False
        self.mend()
        self.head = min(self.head, int(cells.min()))

    def mend(self) -> None:
        """Make all anew that follows from the positions and owners of cells."""
        used = self.owner.sum(0) > 0
        self.pos[~used], self.shift[~used] = -1, 0
        self.n_used = int(used.sum())
        self.used_max = int(_where(used).max(initial=-1)) + 1
        self.lines = [in_order(own, self.pos[own], line.lost) for own, line in zip(map(_where, self.owner), self.lines)]
        self.torn = False

    def _disown(self, i: int, cells: Array) -> None:
        """Take cells from a sequence; those left without an owner become free."""
        self.owner[i, cells] = False
        freed = cells[~self.owner[:, cells].any(0)]
        if not len(freed):
            return
        self.pos[freed] = -1
        self.shift[freed] = 0
        self.n_used -= len(freed)
        self.head = min(self.head, int(freed.min()))
        if int(freed.max()) + 1 == self.used_max:
            self.used_max = int(_where(self.pos[:self.used_max] >= 0).max(initial=-1)) + 1

    # operations on sequences; positions p0 <= p < p1

    def can_remove(self, seq: int, p0: int, p1: int) -> bool:
        return self.line(seq).without(p0, p1).complete(self.window)

    def remove(self, seq: int, p0: int, p1: int) -> None:
        i, line = seq - self.seq0, self.line(seq)
        cells, rest = line.cells[line.where(p0, p1)], line.without(p0, p1)
        self.torn = True
        self._disown(i, cells)
        self.lines[i] = rest
        self.torn = False

    def _shared(self, src: int, dst: int, p0: int, p1: int) -> Line:
        return self.line(dst).without(p0, p1).plus(self.line(src).part(p0, p1))

    def can_share(self, src: int, dst: int, p0: int, p1: int) -> bool:
        return self._shared(src, dst, p0, p1).complete(self.window)

    def share(self, src: int, dst: int, p0: int, p1: int) -> None:
        """`dst` owns what `src` owns there, in place of what it had there."""
        part = self.line(src).part(p0, p1)
        self.remove(dst, p0, p1)
        i = dst - self.seq0
        self.torn = True
        self.owner[i, part.cells] = True
        self.lines[i] = self.lines[i].plus(part)
        self.torn = False

    def mirror(self, other: Cells, src: int, dst: int, p0: int, p1: int) -> None:
        """Hold, in an empty stream, what `src` holds there in another one, in the same cells, with what is to be shifted."""
        part = other.line(src).part(p0, p1)
        self.torn = True
        self.has_shift = other.has_shift
        self.shift[part.cells] = other.shift[part.cells]
        if len(part):
            self.place(part.cells, part.pos, (dst,))
        self.lines[dst - self.seq0] = part
        self.head = self.used_max
        self.torn = False

    def can_move(self, seq: int, p0: int, p1: int, to: Move) -> bool:
        """Not where a cell has another owner too, whose position would move along."""
        line = self.line(seq)
        at = line.where(p0, p1)
        if (self.owner[:, line.cells[at]].sum(0) > 1).any() or to(max(line.last, 0)) >= END:
            return False
        return line.moved(p0, p1, to).complete(self.window)

    def move(self, seq: int, p0: int, p1: int, to: Move) -> None:
        """Positions p become `to(p)`, the difference waits in `shift`; cells that become negative are freed."""
        i, line = seq - self.seq0, self.line(seq)
        at = line.where(p0, p1)
        cells, old = line.cells[at], line.pos[at].astype(np.int64)
        new, moved = to(old), line.moved(p0, p1, to)
        kept = new >= 0
        pos, shift, has_shift = self.pos.copy(), self.shift.copy(), self.has_shift or bool((new != old)[kept].any())
        pos[cells[kept]] = new[kept]
        shift[cells[kept]] += (new - old)[kept].astype(np.int32)
        self.torn = True
        self.pos, self.shift, self.has_shift = pos, shift, has_shift    # together: K must not miss a move
        self.lines[i] = moved
        self._disown(i, cells[~kept])
        self.torn = False


def _highest(x: Array) -> int:
    return int(np.maximum.reduce(x, initial=-1))            # x.max takes a detour through Python


def _where(mask: npt.NDArray[np.bool_]) -> Array:
    return np.flatnonzero(mask).astype(np.int32)


def _side_by_side(free: Array, n: int, head: int) -> Array:
    """n of the free cells: the first run at or after head, else the first run, else what comes from head on."""
    runs = np.flatnonzero(free[n - 1:] - free[:len(free) - n + 1] == n - 1)
    at = int(free.searchsorted(np.int32(head)))
    if not len(runs):
        return np.sort(np.roll(free, -at)[:n])
    start = int(runs[np.searchsorted(runs, at) % len(runs)])
    return free[start:start + n]


def visible(cells: Cells, seq: Array, pos: Array, window: int, swa_type: str, causal: bool,
            n_kv: int | None = None) -> npt.NDArray[np.bool_]:
    """bool [n_tokens, n_kv]: the definition of attention.

    A token of `seq` at `pos` sees a cell if its sequence owns the cell, the cell is not in its future (if causal) and
    the window reaches it.
    """
    w = Window(window, swa_type)
    held, p = cells.pos[None, :n_kv], pos[:, None]
    seen = cells.owner[seq - cells.seq0, :n_kv]
    seen &= held <= w.last(p, causal)
    seen &= held >= w.first(p)
    return seen
