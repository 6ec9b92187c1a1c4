"""From nodes to steps: which kernel runs a node, and what stands in its parameter block.

In: nodes with their places. Out: a list of steps (kernel, fields). A lowering is a function entered for an op, or for a
run of ops that it fuses; it emits steps and returns True, or returns False where its kernels do not fit (the node then
runs through `ref`). Fields are evaluated for the sizes at hand by `Compiled`.

    @lowers("rms_norm")
    def rms_norm(emit, node):
        emit(kernel, node, node.src[0], node.params["eps"])     # tensors: 9 words, ints: 1, floats: float32 bits
        return True
"""
from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from ggraph.tensor import Tensor

from .kernel import Kernel
from .layout import ANYHOW

ONE_THREAD = 2                                   # flag of a step, as `pool` reads it
Lowering = Callable[..., bool]                   # (emit, *nodes)
L = TypeVar("L", bound=Lowering)
LOWERINGS: dict[tuple[str, ...], Lowering] = {}
UNCHAINED: set[tuple[str, ...]] = set()


def lowers(*ops: str, chained: bool = True) -> Callable[[L], L]:
    """Enter a lowering for one op, or for consecutive ops of which each but the last is read by the next alone. Where that
    is not so (`chained` is False), the lowering itself asks `emit.readers` what it need not write."""
    def enter(fn: L) -> L:
        assert ops not in LOWERINGS, ops
        LOWERINGS[ops] = fn
        if not chained:
            UNCHAINED.add(ops)
        return fn
    return enter


@dataclass(frozen=True)
class Scratch:
    """A byte offset in the scratch memory of one compiled split."""
    offset: int


Field = Tensor | Scratch | int | float
Cuts = dict[int, int]                            # how a step can be cut into shares, as `join` has it: into how many things


@dataclass(eq=False)
class Step:
    """`cuts`: None where the step must stand alone; else `how` follows the fields in the block, and all that is written
    is `writes`, one of them."""
    kernel: Kernel
    fields: tuple[Field, ...]
    flags: int
    nodes: tuple[Tensor, ...] = ()
    cuts: Cuts | None = None
    writes: Field = 0
    how: int = ANYHOW

    @property
    def block(self) -> tuple[Field, ...]:
        """All of the parameter block."""
        return self.fields if self.cuts is None else (*self.fields, self.how)


class Emit:
    """Collects the steps of one split. Scratch memory is reused by the next that asks for the same purpose."""

    def __init__(self, panels: Callable[[Tensor], int | None]):
        self.steps: list[Step] = []
        self.panels = panels                     # weight -> address of its packed panels, None if it is not packed
        self._scratch: dict[Hashable, tuple[Scratch, int, object]] = {}
        self.turn = 0                               # which of two areas for one purpose was last written
        self.scratch_bytes = 0
        self.reads: dict[Tensor, list[Tensor]] = {}
        self.keep: frozenset[Tensor] = frozenset()

    def readers(self, node: Tensor) -> list[Tensor] | None:
        """The nodes of the split that read of what the node's root holds; None if it is read after the split too."""
        return None if node.root in self.keep else self.reads.get(node.root, [])

    def __call__(self, kernel: Kernel, *fields: Field, flags: int = 0, cuts: Cuts | None = None, writes: Field | None = None
                 ) -> None:
        """Add a step. With `cuts` it may be joined with its neighbours; `writes` is the first field if not given."""
        self.steps.append(Step(kernel, fields, flags, (), cuts, fields[0] if writes is None else writes))

    def holds(self, purpose: Hashable, nbytes: int, content: object) -> Scratch | None:
        """The memory for this purpose, if it is as large and an earlier step left `content` there."""
        place, size, held = self._scratch.get(purpose, (None, 0, None))
        return place if size >= nbytes and held is content else None

    def scratch(self, purpose: Hashable, nbytes: int, content: object = None) -> tuple[Scratch, bool]:
        """(memory for this purpose, whether it still holds `content` from an earlier step)."""
        place, size, held = self._scratch.get(purpose, (None, 0, None))
        if place is None or size < nbytes:
            place, size, held = Scratch(self.scratch_bytes), -(-int(nbytes) // 64) * 64, None
            self.scratch_bytes += size
        self._scratch[purpose] = place, size, content
        return place, content is not None and held == content


def words(fields: Sequence[Field], scratch: int) -> list[int]:
    """The parameter block: int64 words, sizes still as `Size`. `scratch` is the address of the scratch memory."""
    out: list[int] = []
    for f in fields:
        if isinstance(f, Tensor):
            buffer, offset = f.place()
            out += [buffer.address + offset, *f.ne, *f.nb]
        elif isinstance(f, Scratch):
            out.append(scratch + f.offset)
        elif isinstance(f, float):
            out.append(struct.unpack("<I", struct.pack("<f", f))[0])
        else:
            out.append(f)
    return out


def lower(nodes: Sequence[Tensor], keep: frozenset[Tensor], emit: Emit) -> list[list[Step] | Tensor]:
    """Per node or fused run: its steps, or the node itself where no kernel fits. `keep` is read after this split."""
    emit.reads, emit.keep = find_readers(nodes), keep
    uses = count_uses(emit.reads, keep)
    lengths: dict[str, set[int]] = {}               # of runs that begin with an op
    for ops in LOWERINGS:
        lengths.setdefault(ops[0], set()).add(len(ops))
    out: list[list[Step] | Tensor] = []
    i = 0
    while i < len(nodes):
        for n in sorted(lengths.get(nodes[i].op, ()), reverse=True):
            run = tuple(nodes[i:i + n])
            steps = _try(run, uses, emit)
            if steps is not None:
                out.append(steps)
                i += n
                break
        else:
            out.append(nodes[i])
            i += 1
    return out


def _try(run: tuple[Tensor, ...], uses: dict[Tensor, int], emit: Emit) -> list[Step] | None:
    ops = tuple(n.op for n in run)
    lowering = LOWERINGS.get(ops)
    if lowering is None or not (ops in UNCHAINED or chained(run, uses)):
        return None
    before = len(emit.steps)
    if not lowering(emit, *run):
        del emit.steps[before:]
        return None
    steps = emit.steps[before:]
    for step in steps:
        step.nodes = step.nodes or run
    return steps


def chained(run: Sequence[Tensor], uses: dict[Tensor, int]) -> bool:
    """Each node but the last is read by the next one and by nothing else."""
    return all(any(s is not None and s.root is a.root for s in b.src) and uses.get(a.root, 0) == 1
               for a, b in pairwise(run))


def find_readers(nodes: Sequence[Tensor]) -> dict[Tensor, list[Tensor]]:
    """The nodes that read each root."""
    readers: dict[Tensor, list[Tensor]] = {}
    for node in nodes:
        for root in {s.root for s in node.src if s is not None}:
            readers.setdefault(root, []).append(node)
    return readers


def count_uses(reads: Mapping[Tensor, Sequence[Tensor]], keep: frozenset[Tensor]) -> dict[Tensor, int]:
    """How many nodes read each root; what is kept counts once more."""
    uses = {root: len(readers) for root, readers in reads.items()}
    for root in keep:
        uses[root] = uses.get(root, 0) + 1
    return uses
