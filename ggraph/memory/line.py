"""What a window lets a token see, and one sequence's cells in position order. Values only: asking "what if" is free.

In: positions, and the cells that hold them. Out: `Line`, which every operation turns into a new one. It knows neither
who else owns a cell nor which cells are free.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int32]
Pos = TypeVar("Pos", int, Array)
Move = Callable[[Any], Any]             # where a position moves to; of an int or an int64 array, keeps the order
Ranges = tuple[tuple[int, int], ...]    # start <= p < stop, ascending, gaps between
END = 2**31 - 1                         # one past every position

KINDS = ("none", "standard", "chunked", "symmetric")


@dataclass(frozen=True, slots=True)
class Window:
    """A token at position p sees the positions `first(p)` to `last(p)` of its sequence; llama.cpp's kinds."""
    n: int = 0
    kind: str = "none"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown window type {self.kind!r}; known types: {', '.join(KINDS)}")
        if self.kind != "none" and self.n < 1:
            raise ValueError(f"a {self.kind} window of {self.n} positions sees nothing")

    def first(self, p: Pos) -> Pos:
        if self.kind == "none":
            return p * 0
        if self.kind == "standard":
            return p - (self.n - 1)
        return p // self.n * self.n if self.kind == "chunked" else p - self.n // 2

    def last(self, p: Pos, causal: bool) -> Pos:
        if causal:
            return p
        return p + self.n // 2 if self.kind == "symmetric" else p * 0 + (END - 1)


class _Room:
    """Arrays that the lines of one past share. The first `n` entries are written and stay as they are."""
    __slots__ = ("cells", "n", "pos")

    def __init__(self, cells: Array, pos: Array, n: int):
        self.cells, self.pos, self.n = cells, pos, n


class Line:
    """The cells of one sequence in the order (position, cell).

    A line never changes; operations give a new one. `lost` are the positions whose cells a window gave away: they
    follow every operation as if they were still here, so that it is known when one would come into sight again.
    """
    __slots__ = ("_room", "_start", "_stop", "lost")

    def __init__(self, room: _Room, start: int, stop: int, lost: Ranges = ()):
        self._room, self._start, self._stop, self.lost = room, start, stop, lost

    @property
    def cells(self) -> Array:
        """int32 [len]"""
        return self._room.cells[self._start:self._stop]

    @property
    def pos(self) -> Array:
        """int32 [len], ascending"""
        return self._room.pos[self._start:self._stop]

    def __len__(self) -> int:
        return self._stop - self._start

    @property
    def first(self) -> int:
        """The lowest position, -1 if there is none."""
        return int(self._room.pos[self._start]) if len(self) else -1

    @property
    def last(self) -> int:
        """The highest position, -1 if there is none."""
        return int(self._room.pos[self._stop - 1]) if len(self) else -1

    def where(self, p0: int, p1: int) -> slice:
        """Where the positions p0 <= p < p1 stand."""
        # int32 keys: others make NumPy convert the whole line first
        return slice(*(int(self.pos.searchsorted(np.int32(p))) for p in (p0, p1)))

    def extend(self, cells: Array, pos: Array) -> Line:
        """With more cells; O(new), amortised, where they come after all others and no other line went on from here."""
        n, room, stop = len(cells), self._room, self._stop
        if not n:
            return self
        if len(self) and (int(pos[0]), int(cells[0])) <= (self.last, int(room.cells[stop - 1])):
            return in_order(np.concatenate([self.cells, cells]), np.concatenate([self.pos, pos]), self.lost)
        if stop != room.n or stop + n > len(room.cells):
            return self._roomy(n).extend(cells, pos)
        room.cells[stop:stop + n] = cells
        room.pos[stop:stop + n] = pos
        room.n = stop + n
        return Line(room, self._start, stop + n, self.lost)

    def _roomy(self, n: int) -> Line:
        """The same in arrays of its own with room for n more, and then as many again."""
        size, here = 2 * (len(self) + n) + 16, len(self)
        room = _Room(np.empty(size, np.int32), np.empty(size, np.int32), here)
        room.cells[:here], room.pos[:here] = self.cells, self.pos
        return Line(room, 0, here, self.lost)

    def without(self, p0: int, p1: int) -> Line:
        """Without the positions p0 <= p < p1."""
        at, n, lost = self.where(p0, p1), len(self), _outside(self.lost, p0, p1)
        if at.start == 0:
            return Line(self._room, self._start + at.stop, self._stop, lost)
        if at.stop == n:
            return Line(self._room, self._start, self._start + at.start, lost)
        keep = np.r_[0:at.start, at.stop:n]
        return _exact(self.cells[keep], self.pos[keep], lost)

    def evicted(self, n: int) -> Line:
        """Without the first n cells, n > 0, which a window gave away."""
        pos = self.pos[:n]
        breaks = np.flatnonzero(np.diff(pos) > 1)
        lost = zip(pos[np.r_[0, breaks + 1]].tolist(), (pos[np.r_[breaks, n - 1]] + 1).tolist())
        return Line(self._room, self._start + n, self._stop, joined(self.lost, lost))

    def remembering(self, lost: Ranges) -> Line:
        """With more positions that a window gave away."""
        return Line(self._room, self._start, self._stop, joined(self.lost, lost))

    def part(self, p0: int, p1: int) -> Line:
        """The positions p0 <= p < p1 alone."""
        at = self.where(p0, p1)
        return Line(self._room, self._start + at.start, self._start + at.stop, _inside(self.lost, p0, p1))

    def plus(self, other: Line) -> Line:
        """With all that another line holds and has lost."""
        return self.extend(other.cells, other.pos).remembering(other.lost)

    def moved(self, p0: int, p1: int, to: Move) -> Line:
        """With positions p0 <= p < p1 moved to `to(p)`, without those that become negative."""
        pos, at = self.pos.astype(np.int64), self.where(p0, p1)
        pos[at] = to(pos[at])
        keep = pos >= 0
        gone = [(max(to(a), 0), to(b - 1) + 1) for a, b in _inside(self.lost, p0, p1) if to(b - 1) >= 0]
        return in_order(self.cells[keep], pos[keep].astype(np.int32), joined(_outside(self.lost, p0, p1), gone))

    def complete(self, window: Window) -> bool:
        """The next token, and so all later ones, would find all it may see; and the last position is not lost."""
        return not self.lost or (len(self) > 0 and window.first(self.last + 1) >= self.lost[-1][1])


def in_order(cells: Array, pos: Array, lost: Ranges) -> Line:
    """A line of these cells, given in any order."""
    order = np.lexsort((cells, pos))
    return _exact(cells[order], pos[order], lost)


def empty() -> Line:
    """A sequence without a past."""
    return _exact(np.zeros(0, np.int32), np.zeros(0, np.int32), ())


def _exact(cells: Array, pos: Array, lost: Ranges) -> Line:
    """Of arrays that nobody changes."""
    return Line(_Room(cells, pos, len(cells)), 0, len(cells), lost)


def joined(*ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The positions of all ranges."""
    out: list[tuple[int, int]] = []
    for a, b in sorted(r for rs in ranges for r in rs):
        if out and a <= out[-1][1]:
            a, b = out[-1][0], max(b, out.pop()[1])
        out.append((a, b))
    return tuple(out)


def _inside(ranges: Ranges, p0: int, p1: int) -> Ranges:
    return tuple((max(a, p0), min(b, p1)) for a, b in ranges if max(a, p0) < min(b, p1))


def _outside(ranges: Ranges, p0: int, p1: int) -> Ranges:
    return joined(_inside(ranges, 0, p0), _inside(ranges, p1, END)) if p0 < p1 else ranges
