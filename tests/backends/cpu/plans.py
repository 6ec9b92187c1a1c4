"""Small plans on the native backend: a backend with a fixed number of threads, and results as arrays.

In: arrays and nodes made of them. Out: results, and the plan that gave them, whose steps and fallbacks tests count.
"""
from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ggraph.backend import HostBuffer, Repeat
from ggraph.backends import cpu
from ggraph.backends.ref.arrays import Operand
from ggraph.dtypes import F32, I32, DType
from ggraph.tensor import Tensor, leaf
from tests.backends.opcase import nodes_of

Array = Any


class Native(cpu.Cpu):
    """Runs every plan with `n_threads`, and keeps the plans."""

    def __init__(self, n_threads: int = 1):
        super().__init__()
        self.n_threads = n_threads
        self.plans: list[cpu.Compiled] = []

    def compile(self, nodes: Sequence[Tensor], keep: Collection[Tensor] = (), repeat: Repeat | None = None) -> Any:
        self.plans.append(_Threaded(self, nodes, frozenset(keep)))
        return self.plans[-1]

    @property
    def fallback(self) -> list[str]:
        """Ops of the last plan that had no kernel."""
        return [n.op for n in self.plans[-1].fallback]

    @property
    def n_steps(self) -> int:
        return len(self.plans[-1].table)


class _Threaded(cpu.Compiled):
    def run(self, n_threads: int = 0, times: Any = None) -> None:
        assert isinstance(self.backend, Native)
        super().run(n_threads or self.backend.n_threads, times)


def tensor(x: Array, type: DType = F32) -> Tensor:
    """A leaf over a copy of x: elements (float32, int32), or the rows' bytes (uint8) of any type."""
    x = np.ascontiguousarray(x)
    shape = (*x.shape[:-1], x.shape[-1] // type.nbytes * type.block) if x.dtype == np.uint8 else x.shape
    node = leaf(I32 if x.dtype == np.int32 else type, shape[::-1], "leaf")
    node.buffer = HostBuffer(np.array(x).reshape(-1).view(np.uint8))
    return node


def evaluate(node: Tensor, backend: Any, keep: Collection[Tensor] = ()) -> Array:
    """The result in NumPy order with all four axes, after running everything that `node` needs."""
    nodes = nodes_of(node)
    for n in nodes:
        if n.view_src is None and n.buffer is None:
            n.buffer = HostBuffer(np.full(max(int(n.nbytes), 1), 0xFF, np.uint8))
    backend.compile(nodes, {node.root, *keep}).run()
    ne, nb = [int(n) for n in node.ne], [int(n) for n in node.nb]
    return np.array(Operand(node, ne, nb, node.root.offset + node.view_offs, {}).read())
