"""The nodes of a split that are still to run: who reads them, and which may run before those in between.

In: nodes with their places. Out: what fusions ask. The arena was laid out for the order of the graph: a node may only be brought
forward if it touches nothing that a skipped one writes, and writes nothing that a skipped one touches.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from ggraph.ops import VIEWS
from ggraph.tensor import Tensor

from ..lowering import Readers, extent

WINDOW = 24                 # how many nodes ahead a fusion looks
Span = tuple[Any, int, int]


class Flow:
    def __init__(self, nodes: Sequence[Tensor], keep: frozenset[Tensor]):
        self.nodes, self.readers = nodes, Readers(nodes, keep)
        self.order = {node: i for i, node in enumerate(nodes)}
        self.changed = {n.view_src for n in nodes if n.view_src is not None and n.op not in VIEWS}      # written more than once
        self.at = 0
        self.done: set[Tensor] = set()
        self.single = False                     # what is lowered now stands for no fusion, and leaves floats
        self._extents: dict[Tensor, Span] = {}

    def __iter__(self) -> Iterator[Tensor]:
        """Nodes in order, without those that were done before their turn."""
        for i, node in enumerate(self.nodes):
            self.at = i
            if node not in self.done:
                yield node

    def ahead(self, n: int = WINDOW) -> Iterator[Tensor]:
        """The next nodes still to run, the present one first."""
        return islice((x for x in islice(self.nodes, self.at, self.at + 2 * n) if x not in self.done), n)

    def next(self, node: Tensor, *ops: str) -> Tensor | None:
        """The only node that reads the node's bytes, if it is one of these ops."""
        readers = self.readers.of(node)
        return readers[0] if readers is not None and len(readers) == 1 and readers[0].op in ops else None

    def can_run(self, *nodes: Tensor) -> bool:
        """Whether these may run together, now, before all others that are still to run."""
        group = set(nodes)
        return not any(self._clash(node, other) for node in nodes for other in self.nodes[self.at:self.order[node]]
                       if other not in self.done and other not in group)

    def _clash(self, a: Tensor, b: Tensor) -> bool:
        """One writes what the other touches."""
        return (any(_overlap(self._extent(a), self._extent(x)) for x in (b, *b.src) if x is not None)
                or any(_overlap(self._extent(b), self._extent(x)) for x in a.src if x is not None))

    def _extent(self, x: Tensor) -> Span:
        root = x.root
        if root not in self._extents:
            self._extents[root] = extent(root)
        return self._extents[root]


def _overlap(a: Span, b: Span) -> bool:
    return a[0] is b[0] and a[1] < b[2] and b[1] < a[2]
