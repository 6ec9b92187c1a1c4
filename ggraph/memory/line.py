"""What a window lets a token see, and one sequence's cells in position order. Values only: asking "what if" is free."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int32]
Pos = TypeVar("Pos", int, Array)
Move = Callable[[Any], Any]      # where a position moves to; of an int or an int64 array
END = 2**31 - 1         # one past every position

KINDS = ("none", "standard", "chunked", "symmetric")


@dataclass(frozen=True, slots=True)
class Window:
    """A token at position p sees the positions `first(p)` to `last(p)` of its sequence; llama.cpp's four kinds."""
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


class Line:
    """The cells of one sequence in the order (position, cell).

    A line never changes; operations give a new one. `floor`: the sequence had positions below it whose cells a window
    gave away (0: none); everything at or above it that the sequence should hold is here.
    Lines share buffers: `extend` writes behind its own end, so of all lines with one past only one lives on.
    """
    __slots__ = ("_cells", "_pos", "_start", "_stop", "floor")

    def __init__(self, cells: Array, pos: Array, start: int, stop: int, floor: int):
        self._cells, self._pos, self._start, self._stop, self.floor = cells, pos, start, stop, floor

    @property
    def cells(self) -> Array:
        """int32 [len]"""
        return self._cells[self._start:self._stop]

    @property
    def pos(self) -> Array:
        """int32 [len], ascending"""
        return self._pos[self._start:self._stop]

    def __len__(self) -> int:
        return self._stop - self._start

    @property
    def first(self) -> int:
        """The lowest position, -1 if there is none."""
        return int(self._pos[self._start]) if len(self) else -1

    @property
    def last(self) -> int:
        """The highest position, -1 if there is none."""
        return int(self._pos[self._stop - 1]) if len(self) else -1

    def where(self, p0: int, p1: int) -> slice:
        """Where the positions p0 <= p < p1 stand."""
        # int32 keys: others make NumPy convert the whole line first
        return slice(*(int(self.pos.searchsorted(np.int32(p))) for p in (p0, p1)))

    def extend(self, cells: Array, pos: Array) -> Line:
        """With more cells; O(new) where they come after all others in the order."""
        n, stop = len(cells), self._stop
        if not n:
            return self
        if len(self) and (int(pos[0]), int(cells[0])) <= (self.last, int(self._cells[stop - 1])):
            return in_order(np.concatenate([self.cells, cells]), np.concatenate([self.pos, pos]), self.floor)
        if stop + n > len(self._cells):
            return _roomy(self.cells, self.pos, self.floor, n).extend(cells, pos)
        self._cells[stop:stop + n] = cells
        self._pos[stop:stop + n] = pos
        return Line(self._cells, self._pos, self._start, stop + n, self.floor)

    def without(self, p0: int, p1: int) -> Line:
        """Without the positions p0 <= p < p1."""
        at, n = self.where(p0, p1), len(self)
        floor = p0 if p0 < self.floor <= p1 else self.floor
        if at.start == 0 or at.stop == n:
            start, stop = (at.stop, n) if at.start == 0 else (0, at.start)
            return Line(self._cells, self._pos, self._start + start, self._start + stop, floor)
        keep = np.r_[0:at.start, at.stop:n]
        return _exact(self.cells[keep], self.pos[keep], floor)

    def evicted(self, n: int) -> Line:
        """Without the first n cells, which a window gave away."""
        floor = int(self._pos[self._start + n - 1]) + 1 if n else self.floor
        return Line(self._cells, self._pos, self._start + n, self._stop, max(floor, self.floor))

    def only(self, keep: npt.NDArray[np.bool_]) -> Line:
        """Without the cells that are not to be kept, as if they had never been."""
        return _exact(self.cells[keep], self.pos[keep], self.floor)

    def part(self, p0: int, p1: int) -> Line:
        """The positions p0 <= p < p1 alone, as another sequence would take them over."""
        at = self.where(p0, p1)
        return _exact(self.cells[at].copy(), self.pos[at].copy(), min(self.floor, p1) if self.floor > p0 else 0)

    def joined(self, other: Line) -> Line:
        """With all of another line's cells."""
        return self.extend(other.cells, other.pos).raised(other.floor)

    def raised(self, floor: int) -> Line:
        """With a floor not lower than this one."""
        return Line(self._cells, self._pos, self._start, self._stop, max(floor, self.floor))

    def moved(self, p0: int, p1: int, to: Move) -> Line:
        """With positions p0 <= p < p1 moved to `to(p)`, without those that become negative."""
        pos, at, floor = self.pos.astype(np.int64), self.where(p0, p1), self.floor
        pos[at] = to(pos[at])
        if floor > p0:      # of what was given away, the top of each part moves with its part
            floor = max(p0, int(to(min(floor, p1) - 1)) + 1, floor if floor > p1 else 0)
        keep = pos >= 0
        return in_order(self.cells[keep], pos[keep].astype(np.int32), floor)

    def complete(self, window: Window) -> bool:
        """The next token, and so all later ones, would find everything it may see; and the last position is known."""
        return self.floor == 0 or (len(self) > 0 and window.first(self.last + 1) >= self.floor)


def in_order(cells: Array, pos: Array, floor: int) -> Line:
    """A line of these cells, given in any order."""
    order = np.lexsort((cells, pos))
    return _exact(cells[order], pos[order], floor)


def empty() -> Line:
    """A sequence without a past."""
    return _exact(np.zeros(0, np.int32), np.zeros(0, np.int32), 0)


def _exact(cells: Array, pos: Array, floor: int) -> Line:
    return Line(cells, pos, 0, len(cells), floor)


def _roomy(cells: Array, pos: Array, floor: int, n: int) -> Line:
    """In fresh buffers with room for n more cells and as many as there are."""
    room = 2 * (len(cells) + n) + 16
    line = Line(np.empty(room, np.int32), np.empty(room, np.int32), 0, 0, floor)
    return line.extend(cells, pos)
