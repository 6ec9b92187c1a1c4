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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ggraph.tensor import Tensor

from ..lowering import Readers, Scratch, ScratchMemory
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


class Address(int):
    """Where the packed panels of a weight are."""
    weight: Tensor


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


class Emit(ScratchMemory):
    """Collects the steps of one split."""

    def __init__(self, panels: Callable[[Tensor], int | None]):
        super().__init__(align=64)
        self.steps: list[Step] = []
        self._panels = panels                       # weight -> address of its packed panels, None if it is not packed
        self.turn = 0                               # which of two areas for one purpose was last written
        self.readers = Readers().of

    def panels(self, weight: Tensor) -> Address | None:
        """The address of a weight's packed panels, None if it is not packed."""
        found = self._panels(weight)
        if found is None:
            return None
        address = Address(found)
        address.weight = weight
        return address

    def __call__(self, kernel: Kernel, *fields: Field, flags: int = 0, cuts: Cuts | None = None, writes: Field | None = None
                 ) -> None:
        """Add a step. With `cuts` it may be joined with its neighbours; `writes` is the first field if not given."""
        self.steps.append(Step(kernel, fields, flags, (), cuts, fields[0] if writes is None else writes))


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
    readers = Readers(nodes, keep)
    emit.readers = readers.of
    starting: dict[str, list[tuple[str, ...]]] = {}         # lowerings by their first op, the longest first
    for ops in sorted(LOWERINGS, key=len, reverse=True):
        starting.setdefault(ops[0], []).append(ops)
    here = [node.op for node in nodes]
    out: list[list[Step] | Tensor] = []
    i = 0
    while i < len(nodes):
        for ops in starting.get(here[i], ()):
            if here[i:i + len(ops)] == [*ops] and (steps := _try(ops, tuple(nodes[i:i + len(ops)]), readers, emit)) is not None:
                out.append(steps)
                i += len(ops)
                break
        else:
            out.append(nodes[i])
            i += 1
    return out


def _try(ops: tuple[str, ...], run: tuple[Tensor, ...], readers: Readers, emit: Emit) -> list[Step] | None:
    if not (len(ops) == 1 or ops in UNCHAINED or readers.chained(run)):
        return None
    before = len(emit.steps)
    if not LOWERINGS[ops](emit, *run):
        del emit.steps[before:]
        return None
    steps = emit.steps[before:]
    for step in steps:
        step.nodes = step.nodes or run
    return steps
