"""From nodes to launches: which kernels run a node, with which arguments and over how many blocks.

In: nodes. Out: a list of launches whose arguments are tensors and numbers; `Compiled` evaluates them for the sizes at hand. A
lowering is a function entered for an op, or for a run of ops that it fuses; it emits launches and returns True, or returns False
where no kernel fits (the scheduler then gives the node to the host).

    @lowers("rms_norm")
    def rms_norm(emit, node):
        emit(Kernel("rows", "normalize"), node, node.src[0], 1, node.params["eps"], grid=rows(node))
        return True
"""
from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from ggraph.tensor import Tensor

from .device import Dim, Kernel

Lowering = Callable[..., bool]                   # (emit, *nodes)
L = TypeVar("L", bound=Lowering)
LOWERINGS: dict[tuple[str, ...], Lowering] = {}
FREE: set[tuple[str, ...]] = set()


def lowers(*ops: str, chained: bool = True) -> Callable[[L], L]:
    """Enter a lowering for one op, or for consecutive ops of which each but the last is read by the next alone. Where that
    is not so (`chained` is False), the lowering itself asks `emit.readers` what it need not write."""
    def enter(fn: L) -> L:
        assert ops not in LOWERINGS, ops
        LOWERINGS[ops] = fn
        if not chained:
            FREE.add(ops)
        return fn
    return enter


@dataclass(frozen=True)
class Scratch:
    """A byte offset in the scratch memory of one compiled split."""
    offset: int


@dataclass(frozen=True)
class Blocks:
    """ceil(n / each) blocks along one axis of a grid; n may depend on the batch."""
    n: int
    each: int = 1


# A tensor is 9 words (address, ne, nb), None a tensor that is not there; a float is its float32 bits; a tuple is a struct of these.
Arg = Tensor | Scratch | int | float | tuple[int | float, ...] | None
Condition = tuple[int, int, int]                 # run only if the first, which may depend on the batch, is from .. to ..


@dataclass(eq=False)
class Launch:
    kernel: Kernel
    grid: tuple[Blocks, Blocks, Blocks]
    block: Dim
    shared: int
    args: tuple[Arg, ...]
    condition: Condition | None
    nodes: tuple[Tensor, ...] = ()


class Emit:
    """Collects the launches of one split. Scratch memory is reused by the next that asks for the same purpose."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self._scratch: dict[Hashable, tuple[Scratch, int, object]] = {}
        self.scratch_bytes = 0
        self.reads: dict[Tensor, list[Tensor]] = {}
        self.keep: frozenset[Tensor] = frozenset()
        self._condition: Condition | None = None

    def readers(self, node: Tensor) -> list[Tensor] | None:
        """The nodes of the split that read of what the node's root holds; None if it is read after the split too."""
        return None if node.root in self.keep else self.reads.get(node.root, [])

    def __call__(self, kernel: Kernel, *args: Arg, grid: Sequence[int | Blocks], block: int = 256, shared: int = 0) -> None:
        """Add a launch. `grid` has up to three axes, numbers of blocks or `Blocks`; `shared` counts bytes."""
        whole = [b if isinstance(b, Blocks) else Blocks(b) for b in (*grid, *(1,) * (3 - len(grid)))]
        self.launches.append(Launch(kernel, (whole[0], whole[1], whole[2]), (block, 1, 1), shared, args, self._condition))

    @contextmanager
    def when(self, n: int, least: int, most: int = 1 << 62) -> Iterator[None]:
        """What is launched within runs only where n, a size of the batch, is from `least` to `most`."""
        if type(n) is int and not least <= n <= most:
            before = len(self.launches)
            yield
            del self.launches[before:]
            return
        self._condition = (n, least, most)
        yield
        self._condition = None

    def scratch(self, purpose: Hashable, nbytes: int, content: object = None) -> tuple[Scratch, bool]:
        """(memory for this purpose, whether it still holds `content` from an earlier launch)."""
        place, size, held = self._scratch.get(purpose, (None, 0, None))
        nbytes = int(nbytes)
        if place is None or size < nbytes:
            place, size, held = Scratch(self.scratch_bytes), -(-nbytes // 256) * 256, None
            self.scratch_bytes += size
        self._scratch[purpose] = place, size, content
        return place, content is not None and held is content


def lower(nodes: Sequence[Tensor], keep: frozenset[Tensor], emit: Emit) -> None:
    """Emit the launches of all nodes; `keep` is read after this split. Every node must be one that `can` accepts."""
    emit.reads, emit.keep = find_readers(nodes), keep
    lengths: dict[str, set[int]] = {}               # of runs that begin with an op
    for ops in LOWERINGS:
        lengths.setdefault(ops[0], set()).add(len(ops))
    i = 0
    while i < len(nodes):
        for n in sorted(lengths[nodes[i].op], reverse=True):
            if _try(tuple(nodes[i:i + n]), emit):
                i += n
                break
        else:
            raise NotImplementedError(f"no CUDA kernel runs {nodes[i]!r}")


def can(node: Tensor) -> bool:
    """Whether there is a kernel for this node alone."""
    return (node.op,) in LOWERINGS and LOWERINGS[node.op,](Emit(), node)


def _try(run: tuple[Tensor, ...], emit: Emit) -> bool:
    ops = tuple(n.op for n in run)
    lowering = LOWERINGS.get(ops)
    if lowering is None or not (ops in FREE or chained(run, emit)):
        return False
    before = len(emit.launches)
    if not lowering(emit, *run):
        del emit.launches[before:]
        return False
    for launch in emit.launches[before:]:
        launch.nodes = launch.nodes or run
    return True


def chained(run: Sequence[Tensor], emit: Emit) -> bool:
    """Each node but the last is read by the next one and by nothing else."""
    return all(emit.readers(a) == [b] for a, b in pairwise(run))


def find_readers(nodes: Sequence[Tensor]) -> dict[Tensor, list[Tensor]]:
    """The nodes that read each root."""
    readers: dict[Tensor, list[Tensor]] = {}
    for node in nodes:
        for root in {s.root for s in node.src if s is not None}:
            readers.setdefault(root, []).append(node)
    return readers
