"""Layers that repeat: a run of sections of a graph that differ in their weights and caches alone, of which a few stand for all.

In: computed nodes in running order. Out: a `Fold`: nodes to plan the long way, and what the others are copies of. Sections end
with the nodes that models call `l_out`. Two are alike if all that a pass over the graph can see of them is the same: ops, types,
shapes as polynomials, parameters, and who reads what, counted from the section's own start and from the end of the one before.
It knows no backends: whether the copies are good is for the backend to say, which compiles two of them the long way.
"""
from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

from ..backend import Repeat
from ..ops import VIEWS
from ..size import Size
from ..tensor import Tensor

LEAST = 3               # sections left out that are worth it
MAX_PERIOD = 8
SETTLED = 2             # sections after which memory that steps share is as large as it gets, and what only the first makes is made


class Section:
    """Nodes [start, end) of all, and what they use. `described` is equal for sections that are alike; `leaves` are weights and
    caches in order of use; `seen` numbers the section's nodes, and the views that they read."""

    def __init__(self, nodes: Sequence[Tensor], end: int, before: Section | None):
        self.end: int = end
        self.nodes = nodes[before.end if before else 0:end]
        self.before = {} if before is None else {node: i for i, node in enumerate(before.nodes, -len(before.nodes))}
        self.leaves_before = {} if before is None else before.leaves
        self.seen: dict[Tensor, int] = {}
        self.leaves: dict[Tensor, int] = {}
        self.described: list[object] = []
        self._numbers: list[int] = []
        for node in self.nodes:
            self._describe(node)
        numbers, kinds = self._numbers, list(map(type, self._numbers))
        self.described += [numbers, kinds, [x.terms for x in numbers if type(x) is Size] if Size in kinds else []]

    def _describe(self, node: Tensor) -> None:
        """A node or view, and where its sources are found."""
        seen, before = self.seen, self.before
        found: list[object] = [node.op, node.type, node.params]
        for x in node.src if node.view_src is None else (*node.src, node.view_src):
            if x in seen:
                found.append(seen[x])
            elif x is None or x.op not in VIEWS:
                found.append(before.get(x, x))              # from further away: the same for all sections that are alike
            elif x.op != "none":
                self._describe(x)
                found.append(seen[x])
            elif x.buffer is None:                          # an input, which has no place yet
                found.append(x)
            else:
                found += "leaf", self._leaf(x)
        self.described += found
        self._numbers += node.ne
        if node.view_src is not None:                       # what has bytes of its own is contiguous
            self._numbers += node.nb
            self._numbers.append(node.view_offs)
        seen[node] = len(seen)

    def _leaf(self, leaf: Tensor) -> int:
        if leaf not in self.leaves:
            self.leaves[leaf] = len(self.leaves)
            self.described += [leaf.type, self.leaves_before.get(leaf)]
            self._numbers += leaf.ne
        return self.leaves[leaf]

    def shared(self) -> set[object]:
        """What comes from further away than the section before, the same in all that are alike."""
        return {x for x in self.described if isinstance(x, Tensor)}


def sections(nodes: Sequence[Tensor]) -> list[Section]:
    """Up to the last node called `l_out`."""
    found: list[Section] = []
    for end, node in enumerate(nodes, 1):
        if node.name.startswith("l_out"):
            found.append(Section(nodes, end, found[-1] if found else None))
    return found


class Fold:
    """`nodes` to plan the long way: of a run of periods, which are so many sections each, the first two alone. `repeat` tells what
    the others are; `behind` is the section that follows."""

    def __init__(self, nodes: Sequence[Tensor], periods: Sequence[Sequence[Section]], behind: Section):
        own = [[node for section in period for node in section.nodes] for period in periods]
        self.sample, self.left_out, self.behind = own[1], own[2:], behind
        self.nodes = [*nodes[:periods[1][-1].end], *nodes[periods[-1][-1].end:]]
        self.instead = dict(zip(own[-1], self.sample))
        self.repeat = Repeat(own, [[leaf for section in period for leaf in section.leaves] for period in periods])

    def missed(self, tail: Sequence[Tensor], outputs: Iterable[Tensor]) -> bool:
        """Whether anything reads what is left out, other than the section behind the last one's results; or whether the periods
        have their leaves in common in different ways."""
        gone = {node for nodes in self.left_out for node in nodes}
        near, far = _read(self.behind.nodes), _read(tail).union(t.root for t in outputs)
        first = [[leaves.index(leaf) for leaf in leaves] for leaves in self.repeat.leaves]
        return any(x != first[0] for x in first) or not gone.isdisjoint(far) or not near.isdisjoint(gone - self.instead.keys())

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Meanwhile the section behind the run reads the sample's results, as if it stood right behind that."""
        was = [(t, t.src, t.view_src) for t in self.behind.seen]
        for t, src, view_src in was:
            t.src = tuple(self.instead.get(s, s) for s in src)
            t.view_src = view_src and self.instead.get(view_src, view_src)
        try:
            yield
        finally:
            for t, src, view_src in was:
                t.src, t.view_src = src, view_src

    def spread(self) -> None:
        """What was left out lies where the sample lies."""
        for nodes in self.left_out:
            for t, other in zip(nodes, self.sample):
                t.buffer, t.offset = other.buffer, other.offset


def folds(nodes: Sequence[Tensor], outputs: Collection[Tensor]) -> Iterator[Fold]:
    """To be tried in this order. A period is a layer; two, since places in memory may take turns; or more, where layers do."""
    found = sections(nodes)
    for n in range(1, MAX_PERIOD + 1):
        start, stop = _stretch([a.described == b.described for a, b in zip(found, found[n:])], n)
        start += SETTLED if n > 1 else 0
        read = _read(nodes[found[stop - 1].end:]) if stop else set()
        if stop == len(found) or not read.issuperset(x for s in found[max(0, stop - n):stop] for x in s.shared()):
            stop -= n                       # who reads it last is kept, so that it lasts as long as it would the long way
        stop -= (stop - start) % n
        if stop - start >= 2 * n + LEAST:
            fold = Fold(nodes, [found[at:at + n] for at in range(start, stop, n)], found[stop])
            if not fold.missed(nodes[found[stop].end:], outputs):
                yield fold


def _stretch(same: Sequence[bool], n: int) -> tuple[int, int]:
    """The longest stretch of sections, start and stop, in which each is as the n-th after it."""
    best = start = length = 0
    for i, yes in enumerate(same):
        length = length + 1 if yes else 0
        if length > best:
            best, start = length, i + 1 - length
    return (start, start + best + n) if best else (0, 0)


def _read(nodes: Iterable[Tensor]) -> set[Tensor]:
    """What holds the bytes that they read."""
    return {x.root for node in nodes for x in node.src if x is not None}
