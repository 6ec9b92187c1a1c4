"""The native CPU backend: a split becomes a table of kernels that one call walks in every thread.

In: nodes whose buffers are host memory. Out: `Compiled`. Nodes without a kernel run through `ref` on the same buffers, and
the table is cut there. Weights that a mat-mul reads are repacked once, on first use. It knows nothing of models.
"""
from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from itertools import groupby

import numpy as np

from ggraph.backend import Ceilings, HostBuffer, NodeTime, Repeat
from ggraph.errors import Aborted
from ggraph.ops import VIEWS
from ggraph.size import Sizes
from ggraph.tensor import Tensor

from .. import ref
from . import pool, prepare
from .join import TOGETHER, join
from .kernel import Kernel
from .lower import Emit, Step, lower, words
from .panels import Panels
from .unroll import Unrolled

Progress = Callable[[str, int, int], None]           # (what, done, total)


class Cpu(ref.Ref):
    """Host memory as in `ref`. `repack`: "on", "off" or "auto"; off: weights are read where they are mapped, by `ref`."""
    name = "cpu"
    repeats = True

    def __init__(self, repack: str = "auto"):
        super().__init__()
        self.panels = Panels(repack)
        self.progress: Progress | None = None
        for module in pkgutil.iter_modules(__path__):
            if module.name.startswith("ops_"):
                importlib.import_module(f"{__name__}.{module.name}")

    def pack(self, weights: Sequence[Tensor], progress: Progress | None = None) -> None:
        super().pack(weights)
        self.panels.offer(weights)
        self.progress = progress

    def compile(self, nodes: Sequence[Tensor], keep: Collection[Tensor] = (),  # type: ignore[override]
                repeat: Repeat | None = None) -> Compiled:
        return Compiled(self, nodes, frozenset(keep), repeat)

    def ceilings(self, n_threads: int) -> Ceilings:
        from .probe import ceilings
        return ceilings(n_threads)

    def close(self) -> None:
        super().close()
        self.panels.close()


def open(repack: str = "auto") -> Cpu:
    return Cpu(repack)


class Compiled:
    """Native tables and single nodes of `ref`, in running order."""

    def __init__(self, backend: Cpu, nodes: Sequence[Tensor], keep: frozenset[Tensor], repeat: Repeat | None = None):
        self.backend, self.aborted = backend, False
        nodes = [n for n in nodes if n.op not in VIEWS]
        emit = Emit(backend.panels.address)
        lowered = lower(nodes, keep, emit)
        self.scratch = HostBuffer.zeros(emit.scratch_bytes)
        self.made = [step for item in lowered if isinstance(item, list) for step in item]
        for single, items in groupby(lowered, lambda item: isinstance(item, Tensor)):
            if not single:
                join([step for item in items for step in item])         # type: ignore[union-attr]
        self._write_blocks(repeat)
        backend.panels.fill(backend.progress)
        self.parts = self._parts(lowered)
        self.fallback = [n for n in lowered if isinstance(n, Tensor)]
        self.reads = {f.root for step in self.made for f in step.fields if isinstance(f, Tensor)}
        self.reads |= {s.root for n in self.fallback for s in n.src if s is not None}

    def _compile_kernels(self) -> dict[Kernel, int]:
        report = self.backend.progress
        kernels = list(dict.fromkeys(step.kernel for step in self.made))
        prepare.compile_all(kernels, (lambda done, total: report("kernels", done, total)) if report else None)
        return {kernel: kernel.address for kernel in kernels}

    def _write_blocks(self, repeat: Repeat | None) -> None:
        """All parameter blocks in one array, which `resize` changes in place; and the table of kernels, blocks and flags."""
        numbers: list[int] = []
        starts = [0]
        for step in self.made:
            numbers += words(step.block, self.scratch.address)
            starts.append(len(numbers))
        self.sizes = Sizes(numbers)
        self.unrolled = None if repeat is None else Unrolled(
            self.made, starts, numbers, self.sizes.constants, repeat, self.backend.panels.address)
        code = self._compile_kernels()
        self.table = np.array([[code[s.kernel], start, s.flags] for s, start in zip(self.made, starts)], np.int64).reshape(-1, 3)
        if self.unrolled is not None:
            self.table = self.unrolled.spread(self.sizes, self.table)
        self.table[:, 1] = self.sizes.numbers.ctypes.data + 8 * self.table[:, 1]
        self._address = self.table.ctypes.data

    @cached_property
    def steps(self) -> Sequence[Step]:
        """One for each row of the table."""
        return self.made if self.unrolled is None else self.unrolled.steps(self.made)

    def _parts(self, lowered: Sequence[list[Step] | Tensor]) -> list[range | ref.Plan]:
        """Rows of the table in one go, and between them the nodes that `ref` runs."""
        parts: list[range | ref.Plan] = []
        start = made = 0
        for item in (*lowered, None):
            if isinstance(item, list):
                made += len(item)
                continue
            stop = made if self.unrolled is None else self.unrolled.row(made)
            if stop > start:
                parts.append(range(start, stop))
            if item is not None:
                parts.append(ref.Plan(self.backend, [item]))
            start = stop
        return parts

    def _row(self, rows: range) -> int:
        """The address of the first of them."""
        return self._address + 24 * rows.start

    def resize(self, values: Mapping[str, int]) -> None:
        self.sizes.update(values)
        for part in self.parts:
            if isinstance(part, ref.Plan):
                part.resize(values)

    def run(self, n_threads: int = 1, times: list[NodeTime] | None = None) -> None:
        self._abort(False)
        for part in self.parts:
            if isinstance(part, ref.Plan):
                part.walk(times)
            elif self.aborted:                  # between two tables
                raise Aborted("the run was aborted")
            elif times is None:
                pool.run(self._row(part), len(part), n_threads, owner=self)
            else:
                self._measure(part, n_threads, times)

    def abort(self) -> None:
        self._abort(True)
        pool.abort(self)

    def _abort(self, yes: bool) -> None:
        self.aborted = yes
        for part in self.parts:
            if isinstance(part, ref.Plan):
                part.aborted = yes

    def _measure(self, rows: range, n_threads: int, times: list[NodeTime]) -> None:
        ticks, start = np.zeros(len(rows), np.int64), pool.ticks()
        pool.run(self._row(rows), len(rows), n_threads, owner=self, times=ticks.ctypes.data)
        nodes: list[Tensor] = []
        for step, end in zip(self.steps[rows.start:rows.stop], ticks.tolist()):
            nodes += step.nodes
            if not step.flags & TOGETHER:               # of steps that belong together the last one has the time
                times.append(NodeTime(tuple(dict.fromkeys(nodes)), (end - start) / pool.ticks_per_second()))
                nodes, start = [], end
