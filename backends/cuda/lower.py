"""From nodes to launches: which kernels run a node, with which arguments and over how many blocks.

In: nodes. Out: a list of launches whose arguments are tensors and numbers; `Compiled` evaluates them for the sizes at hand. A
lowering is a function entered for an op; it emits launches and returns True, or returns False where no kernel fits (the scheduler
then gives the node to the host).

    @lowers("rms_norm")
    def rms_norm(emit, node):
        emit(Kernel("rows", "normalize"), node, node.src[0], 1, node.params["eps"], grid=rows(node))
        return True

A fusion is a function entered for the op that its pattern begins with. It looks at what follows, and returns the nodes that it
would run with what emits them, or None. Of several the one with the most nodes is taken.

    @fuses("rms_norm")
    def norm_mul(flow, node):
        mul = flow.next(node, "mul")
        return mul and Fusion((node, mul), lambda emit: emit(...))
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from ggraph.errors import BackendError
from ggraph.tensor import Tensor

from ..lowering import Scratch, ScratchMemory
from .device import Dim, Kernel
from .flow import Flow

Lowering = Callable[["Emit", Tensor], bool]
L = TypeVar("L", bound=Lowering)
LOWERINGS: dict[str, Lowering] = {}


def lowers(op: str) -> Callable[[L], L]:
    """Enter the lowering of an op."""
    def enter(fn: L) -> L:
        assert op not in LOWERINGS, op
        LOWERINGS[op] = fn
        return fn
    return enter


class Fusion(NamedTuple):
    """`nodes`: what it runs, the present one among them; all may run now (`Flow.can_run`)."""
    nodes: tuple[Tensor, ...]
    emit: Callable[[Emit], None]


Matcher = Callable[[Flow, Tensor], "Fusion | None"]
M = TypeVar("M", bound=Matcher)
FUSIONS: dict[str, list[Matcher]] = {}


def fuses(*ops: str) -> Callable[[M], M]:
    """Enter a fusion for the ops that its pattern may begin with."""
    def enter(fn: M) -> M:
        for op in ops:
            FUSIONS.setdefault(op, []).append(fn)
        return fn
    return enter


@dataclass(frozen=True)
class Blocks:
    """ceil(n / each) blocks along one axis of a grid; n may depend on the batch."""
    n: int
    each: int = 1


# A tensor is 9 words (address, ne, nb), None a tensor that is not there; a float is its float32 bits; a tuple is a struct of these.
Arg = Tensor | Scratch | int | float | None | tuple[Any, ...]
Condition = tuple[int, int, int]                 # run only if the first, which may depend on the batch, is from .. to ..


MAX_CONDITIONS = 2


class Tickets(Scratch):
    """Memory that is zero before and after each launch."""


@dataclass(eq=False)
class Launch:
    kernel: Kernel
    grid: tuple[Blocks, Blocks, Blocks]
    block: Dim
    shared: int
    args: tuple[Arg, ...]
    conditions: tuple[Condition, ...]
    nodes: tuple[Tensor, ...] = ()


class Emit(ScratchMemory):
    """Collects the launches of one split."""

    def __init__(self, flow: Flow | None = None, library: bool = False, max_shared: int = 1 << 62) -> None:
        super().__init__(align=256)
        self.flow = flow or Flow((), frozenset())
        self.library, self.max_shared = library, max_shared          # of the device: whether it has `multiply`; bytes of a block
        self.launches: list[Launch] = []
        self.ticket_bytes = 0
        self.turn = 0                            # which of two areas for activations was last written
        self.only_packed: set[Tensor] = set()    # whose floats were left out
        self._conditions: tuple[Condition, ...] = ()

    def __call__(self, kernel: Kernel, *args: Arg, grid: Sequence[int | Blocks], block: int = 256, shared: int = 0) -> None:
        """Add a launch. `grid` has up to three axes, numbers of blocks or `Blocks`; `shared` counts bytes."""
        whole = [b if isinstance(b, Blocks) else Blocks(b) for b in (*grid, *(1,) * (3 - len(grid)))]
        self.launches.append(Launch(kernel, (whole[0], whole[1], whole[2]), (block, 1, 1), shared, args, self._conditions))

    def tickets(self, n: int) -> Tickets:
        """n integers that are zero, and must be so again after the launch."""
        self.ticket_bytes = max(self.ticket_bytes, 4 * int(n))
        return Tickets(0)

    def alone(self, *nodes: Tensor) -> None:
        """Nodes as if they were not fused, in order; for sizes at which a fusion does not pay."""
        self.flow.single = True
        for node in sorted(nodes, key=self.flow.order.__getitem__):
            assert LOWERINGS[node.op](self, node), node
        self.flow.single = False

    @contextmanager
    def when(self, n: int, least: int, most: int = 1 << 62) -> Iterator[None]:
        """What is launched within runs only where n, a size of the batch, is from `least` to `most`. Up to two may be nested."""
        if type(n) is int and not least <= n <= most:
            before = len(self.launches)
            yield
            del self.launches[before:]
            return
        outer = self._conditions
        self._conditions = (*outer, (n, least, most))
        assert len(self._conditions) <= MAX_CONDITIONS
        yield
        self._conditions = outer


def lower(nodes: Sequence[Tensor], keep: frozenset[Tensor], library: bool = False, max_shared: int = 1 << 62) -> Emit:
    """The launches of all nodes; `keep` is read after this split. BackendError for a node that `can` does not accept."""
    flow = Flow(nodes, keep)
    emit = Emit(flow, library, max_shared)
    for node in flow:
        before = len(emit.launches)
        fusion = longest(flow, node)
        if fusion is not None:
            fusion.emit(emit)
        elif not (node.op in LOWERINGS and LOWERINGS[node.op](emit, node)):
            raise BackendError(f"no CUDA kernel runs {node!r}; the scheduler must give it to the host")
        run = fusion.nodes if fusion is not None else (node,)
        flow.done.update(run)
        for launch in emit.launches[before:]:
            launch.nodes = launch.nodes or run
    return emit


def longest(flow: Flow, node: Tensor) -> Fusion | None:
    """What fuses the most nodes, this one among them."""
    found = [f for match in FUSIONS.get(node.op, ()) if (f := match(flow, node)) is not None]
    return max(found, key=lambda f: len(f.nodes), default=None)


def can(node: Tensor, max_shared: int = 1 << 62) -> bool:
    """Whether there is a kernel for this node alone, on a device whose blocks may have so many bytes of shared memory."""
    return node.op in LOWERINGS and LOWERINGS[node.op](Emit(max_shared=max_shared), node)
