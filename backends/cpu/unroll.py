"""Sections that repeat: steps are made for two of them, held against each other, and copied for the others with other addresses.

In: steps with their parameter blocks, and what repeats. Out: where copies stand, and what differs in them. `Uneven` where the two
differ by more than where their weights and caches are: then something else decided how they became steps.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ggraph.backend import Repeat, Uneven
from ggraph.size import Size, Sizes
from ggraph.tensor import Tensor

from .join import TOGETHER
from .lower import Address, Step

Place = tuple[int, int, bool]           # a word of a section's blocks, the number of its leaf, whether it is of the packed panels


@dataclass
class Part:
    """The steps of a section: which they are, and of the words of all blocks the first and the one after the last."""
    steps: slice
    start: int
    stop: int


class Unrolled:
    """`sample`: the part that copies stand behind; `more` int64 [n copies, n words]: what is added to its words in each.

    `starts`: the first word of each step's block, and the end; `numbers` are all words, `constants` what of them is constant."""

    def __init__(self, steps: Sequence[Step], starts: Sequence[int], numbers: Sequence[int], constants: np.ndarray, repeat: Repeat,
                 panels: Callable[[Tensor], int | None]):
        self.repeat = repeat
        first, self.sample = (_part(steps, starts, section) for section in repeat.sections[:2])
        both = [steps[part.steps] for part in (first, self.sample)]
        places = [_places(own, leaves) for own, leaves in zip(both, repeat.leaves)]
        if first.stop != self.sample.start or places[0] != places[1] or _kinds(both[0]) != _kinds(both[1]):
            raise Uneven
        addresses = np.array([[_address(leaves[n], packed, panels) for _, n, packed in places[1]] for leaves in repeat.leaves])
        more = np.zeros((len(addresses), self.sample.stop - self.sample.start), np.int64)
        more[:, [at for at, _, _ in places[1]]] = addresses - addresses[1]
        moved = constants[self.sample.start:self.sample.stop] - constants[first.start:first.stop]
        sizes = [_sizes(numbers[part.start:part.stop]) for part in (first, self.sample)]
        if sizes[0] != sizes[1] or (moved != -more[0]).any():
            raise Uneven
        self.more = more[2:]

    def row(self, made: int) -> int:
        """The row behind the first so many steps that were made, and behind copies that follow them."""
        own = self.sample.steps
        return made if made < own.stop else made + len(self.more) * (own.stop - own.start)

    def spread(self, sizes: Sizes, table: np.ndarray) -> np.ndarray:
        """Put the copies behind their sample: their words, and their rows in the table (kernel, first word of the block, flags)."""
        n, length = self.more.shape
        sizes.repeat(self.sample.start, self.sample.stop, self.more)
        head, own, tail = np.split(table, [self.sample.steps.start, self.sample.steps.stop])
        later = length * np.arange(n + 1)[:, None, None] * [0, 1, 0]
        return np.concatenate([head, (own + later).reshape(-1, 3), tail + later[n]])

    def steps(self, steps: Sequence[Step]) -> list[Step]:
        """All steps, with the nodes that they are of."""
        own = steps[self.sample.steps]
        at = {node: i for i, node in enumerate(self.repeat.sections[1])}
        copies = [replace(step, nodes=tuple(section[at[node]] for node in step.nodes))
                  for section in self.repeat.sections[2:] for step in own]
        return [*steps[:self.sample.steps.stop], *copies, *steps[self.sample.steps.stop:]]


def _part(steps: Sequence[Step], starts: Sequence[int], section: Sequence[Tensor]) -> Part:
    inside = set(section)
    at = [i for i, step in enumerate(steps) if not inside.isdisjoint(step.nodes)]
    found = slice(at[0], at[-1] + 1) if at else slice(0)
    own = steps[found]
    # not so: other steps between them, steps of both sides of the end, nodes that have no step, steps that all belong together
    if len(own) != len(at) or inside != {node for s in own for node in s.nodes} or all(s.flags & TOGETHER for s in own):
        raise Uneven
    return Part(found, starts[found.start], starts[found.stop])


def _kinds(steps: Sequence[Step]) -> list[object]:
    return [(step.kernel, step.flags) for step in steps]


def _places(steps: Sequence[Step], leaves: Sequence[Tensor]) -> list[Place]:
    """Where addresses of leaves stand."""
    number = {leaf: i for i, leaf in enumerate(leaves)}
    found: list[Place] = []
    at = 0
    for field in (f for step in steps for f in step.block):
        if isinstance(field, Tensor):
            if (n := number.get(field.root)) is not None:
                found.append((at, n, False))
            at += 9
        else:
            if isinstance(field, Address):
                found.append((at, number[field.weight], True))
            at += 1
    return found


def _address(leaf: Tensor, packed: bool, panels: Callable[[Tensor], int | None]) -> int:
    address = panels(leaf) if packed else leaf.buffer.address + leaf.offset
    if address is None:
        raise Uneven
    return int(address)


def _sizes(numbers: Sequence[int]) -> list[object]:
    """What depends on the batch."""
    return [(i, {m: c for m, c in x.terms.items() if m}) for i, x in enumerate(numbers) if type(x) is Size]
