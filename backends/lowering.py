"""What lowering is on every backend: who reads what, where tensors lie and whether they overlap, scratch memory.

In: the nodes of a split. Out: facts that rewrite rules ask for. It knows no kernels.
"""
from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ggraph.tensor import Tensor, strides


@dataclass(frozen=True)
class Scratch:
    """A byte offset in the scratch memory of one compiled split."""
    offset: int


class ScratchMemory:
    """Memory that steps of one split leave results in; reused by the next that asks for the same purpose."""

    def __init__(self, align: int):
        self.align = align
        self.scratch_bytes = 0
        self._scratch: dict[Hashable, tuple[Scratch, int, object]] = {}

    def holds(self, purpose: Hashable, nbytes: int, content: object) -> Scratch | None:
        """The memory for this purpose, if it is as large and an earlier step left `content` there."""
        place, size, held = self._scratch.get(purpose, (None, 0, None))
        return place if size >= nbytes and held == content else None

    def scratch(self, purpose: Hashable, nbytes: int, content: object = None) -> tuple[Scratch, bool]:
        """(memory for this purpose, whether it still holds `content` from an earlier step)."""
        place, size, held = self._scratch.get(purpose, (None, 0, None))
        nbytes = int(nbytes)
        if place is None or size < nbytes:
            place, size, held = Scratch(self.scratch_bytes), -(-nbytes // self.align) * self.align, None
            self.scratch_bytes += size
        self._scratch[purpose] = place, size, content
        return place, content is not None and held == content


class Readers:
    """Who reads what in a split; `keep` is read after it."""

    def __init__(self, nodes: Sequence[Tensor] = (), keep: frozenset[Tensor] = frozenset()):
        self.keep = keep
        self.reads: dict[Tensor, list[Tensor]] = {}
        for node in nodes:
            for root in {s.root for s in node.src if s is not None}:
                self.reads.setdefault(root, []).append(node)

    def of(self, node: Tensor) -> list[Tensor] | None:
        """The nodes that read of what the node's root holds; None if it is read after the split too."""
        return None if node.root in self.keep else self.reads.get(node.root, [])

    def chained(self, run: Sequence[Tensor]) -> bool:
        """Each node but the last is read by the next one and by nothing else."""
        return all(self.of(a) == [b] for a, b in pairwise(run))


def packed(x: Tensor) -> bool:
    """Contiguous, whatever is written in the strides of axes of one element."""
    return all(n == 1 or a == b for n, a, b in zip(x.ne, x.nb, strides(x.type, x.ne)))


def apart(dst: Tensor, *sources: Tensor) -> bool:
    """Writing dst row by row spoils no row of the sources that is still to be read: each lies elsewhere, or row for
    row in the same place. To be asked when a fused kernel reads what the last node's result may have replaced."""
    return all(disjoint(dst, x) or (dst.place() == x.place() and dst.nb == x.nb and dst.ne == x.ne) for x in sources)


def disjoint(a: Tensor, b: Tensor) -> bool:
    (home, start, end), (other, first, last) = extent(a), extent(b)
    return home is not other or end <= first or last <= start


def extent(x: Tensor) -> tuple[Any, int, int]:
    """The buffer, and first and one past the last byte of what holds x, at the largest sizes: plain integers, which are
    many times faster than sizes."""
    root = x.root
    n0, n1, n2, n3 = map(int, root.ne)
    start = int(root.offset)
    return root.buffer, start, start + root.type.row_bytes(n0) * n1 * n2 * n3
