"""The reference backend: every op in plain NumPy, which defines what the op means.

In: nodes whose buffers are host memory. Out: a `Plan` that runs them one after the other. Other host backends run
single nodes through it, on the same buffers, where they have no kernel of their own.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from ggraph.backend import Ceilings, HostBuffer, NodeTime, Progress, Repeat
from ggraph.errors import Aborted
from ggraph.ops import VIEWS
from ggraph.size import Sizes
from ggraph.tensor import Tensor

from . import attention, elementwise, matmul, move, recurrent, rope, rows, sample, shape
from .arrays import Array, Kept, Operand
from .table import KERNELS

__all__ = ["KERNELS", "Plan", "Ref", "attention", "elementwise", "matmul", "move", "open", "recurrent", "rope", "rows",
           "sample", "shape"]


class Ref:
    """Weights given to `pack` are kept as float32 from their first use until `close`."""
    name = "ref"
    host = True
    repeats = False

    def __init__(self) -> None:
        self.unpacked: Kept = {}

    def alloc(self, nbytes: int) -> HostBuffer:
        return HostBuffer.zeros(nbytes)

    def free(self, buffer: HostBuffer) -> None:
        """Memory goes with the last reference."""

    def upload(self, buffer: HostBuffer, offset: int, data: Array) -> None:
        if data.nbytes:                             # an empty array has no bytes to cast
            memoryview(buffer.data)[offset:offset + data.nbytes] = memoryview(np.ascontiguousarray(data)).cast("B")     # type: ignore[arg-type]

    def download(self, buffer: HostBuffer, offset: int, nbytes: int) -> Array:
        return buffer.data[offset:offset + nbytes]

    def fetch(self, buffer: HostBuffer, offset: int, nbytes: int) -> Callable[[], np.ndarray]:
        data = self.download(buffer, offset, nbytes).copy()
        return lambda: data

    def supports(self, node: Tensor) -> bool:
        return node.op in KERNELS or node.op in VIEWS

    def pack(self, weights: Sequence[Tensor], progress: Progress | None = None) -> None:
        """Only remembers them: unpacking the whole of a model that is then run for one layer would be waste."""
        self.unpacked.update(dict.fromkeys(weights))
        if progress:
            progress("weights", len(weights), len(weights))

    def compile(self, nodes: Sequence[Tensor], keep: Collection[Tensor] = (), repeat: Repeat | None = None) -> Plan:
        return Plan(self, nodes)

    def ceilings(self, n_threads: int) -> Ceilings | None:
        """NumPy's speed is nobody's measure."""
        return None

    def sync(self) -> None:
        """Every run is finished when it returns."""

    def close(self) -> None:
        self.unpacked.clear()


def open(repack: str = "off") -> Ref:
    return Ref()


class Plan:
    """Nodes in order, with their sizes as they were built until `resize` gives others."""

    def __init__(self, backend: Ref, nodes: Sequence[Tensor]):
        self.backend, self.nodes = backend, nodes
        self.aborted = False
        self.tensors = list(dict.fromkeys(t for node in nodes for t in (node, *node.src) if t is not None))
        self.reads: Collection[Tensor] = {t.root for t in self.tensors}
        numbers = [n for t in self.tensors for n in (*t.ne, *t.nb, t.root.offset, t.view_offs)]
        self.sizes = Sizes(numbers)
        self._place(np.array(numbers, np.int64))

    def resize(self, values: Mapping[str, int]) -> None:
        self._place(self.sizes.set(values))

    def _place(self, numbers: Array) -> None:
        table: list[list[int]] = numbers.reshape(-1, 10).tolist()
        kept = self.backend.unpacked
        self.operands = {t: Operand(t, row[:4], row[4:8], row[8] + row[9], kept) for t, row in zip(self.tensors, table)}

    def run(self, n_threads: int = 1, times: list[NodeTime] | None = None,
            on_node: Callable[[Tensor], None] | None = None) -> None:
        """Compute all nodes; `on_node` is called after each. Aborted when `abort` was called meanwhile."""
        self.aborted = False
        self.walk(times, on_node)

    def abort(self) -> None:
        """The next node is not started; without a run in progress nothing happens."""
        self.aborted = True

    def walk(self, times: list[NodeTime] | None = None, on_node: Callable[[Tensor], None] | None = None) -> None:
        """`run` as a part of something that has begun: an abort since then counts."""
        with np.errstate(all="ignore"):             # infinities and NaN are results like others
            for node in self.nodes:
                if self.aborted:
                    raise Aborted("the run was aborted")
                start = time.perf_counter()
                self._compute(node)
                if times is not None:
                    times.append(NodeTime((node,), time.perf_counter() - start))
                if on_node:
                    on_node(node)

    def _compute(self, node: Tensor) -> None:
        if node.op in VIEWS:
            return
        out = self.operands[node]
        result = KERNELS[node.op](out, *(None if s is None else self.operands[s] for s in node.src))
        if result is not None:
            out.write(result)

    def read(self, tensor: Tensor) -> Array:
        """Elements of a node or source in NumPy order, float32 where it is of any float or quantized type."""
        return self.operands[tensor].read()

    def write(self, tensor: Tensor, x: Array) -> None:
        """Replace the elements of a node or source."""
        self.operands[tensor].write(x)
