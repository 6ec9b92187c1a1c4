"""A split on the device: its launches with all numbers evaluated, run one by one or as one captured graph.

In: nodes. Out: `run`. All arguments stand in one array of words, which `resize` changes in place; a launch points into it. Sizes
that were seen twice are captured: from then on they are one replay.
"""
from __future__ import annotations

import struct
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ggraph.backend import NodeTime
from ggraph.errors import Aborted
from ggraph.size import Sizes
from ggraph.tensor import Tensor

from ..lowering import Scratch
from .device import LARGEST_ARG, LIBRARY, Dim
from .lower import MAX_CONDITIONS, Arg, Condition, Emit, Launch, Tickets

if TYPE_CHECKING:
    from . import Cuda

MAX_GRAPHS = 8              # of one split: sizes that come back
PAST_END = LARGEST_ARG // 8


class Compiled:
    def __init__(self, backend: Cuda, emit: Emit):
        self.backend, self.device = backend, backend.device
        self.launches = emit.launches
        self.reads: Collection[Tensor] = {t.root for launch in self.launches for t in tensors(launch.args)}
        self.scratch, self.tickets = backend.share("scratch", emit.scratch_bytes), backend.share("tickets", emit.ticket_bytes)
        self.sizes: Sizes | None = None                                       # from the first run on: places are known then
        self.key: Any = None                                                  # and these are the sizes that launches have
        self.aborted = False
        self.graphs: OrderedDict[tuple[int, ...], Any] = OrderedDict()       # by sizes; None: seen once
        for launch in self.launches:
            if launch.kernel is not LIBRARY:
                self.device.function(launch.kernel)

    def _write_words(self) -> None:
        """All arguments, then grids and conditions, as words of one array; for each launch the addresses of its arguments."""
        numbers: list[int] = []
        starts: list[list[int]] = []
        for launch in self.launches:
            starts.append([])
            for arg in launch.args:
                starts[-1].append(len(numbers))
                numbers += self._words(arg)
        self.n_args = len(numbers)
        for launch in self.launches:
            numbers += [blocks.n for blocks in launch.grid] + [n for n, _, _ in padded(launch.conditions)]
        self.sizes = Sizes([*numbers, *[0] * PAST_END])                           # whoever copies an argument may read beyond it
        base = self.sizes.numbers.ctypes.data
        self.args = [np.array([base + 8 * i for i in s], np.uint64) for s in starts]
        self._each = np.array([[b.each for b in launch.grid] for launch in self.launches], np.int64).reshape(-1, 3)
        self._numbers = self.sizes.numbers
        limits = [[c[1:] for c in padded(launch.conditions)] for launch in self.launches]
        self._limits = np.array(limits, np.int64).reshape(-1, MAX_CONDITIONS, 2)

    def _words(self, arg: Arg) -> list[int]:
        if isinstance(arg, Tensor):
            address, offset = self.backend.place(arg)
            return [address + offset, *arg.ne, *arg.nb]
        if arg is None:
            return [0] * 9
        if isinstance(arg, Tickets):
            return [self.tickets + arg.offset]
        if isinstance(arg, Scratch):
            return [self.scratch + arg.offset]
        if isinstance(arg, float):
            return [struct.unpack("<I", struct.pack("<f", arg))[0]]
        if isinstance(arg, tuple):
            return [word for part in arg for word in self._words(part)]
        return [arg]

    def _take_sizes(self) -> None:
        """Grids, and which launches run, for the numbers as they are."""
        assert self.sizes is not None
        rows = self._numbers[self.n_args:-PAST_END].reshape(-1, 3 + MAX_CONDITIONS)
        grids = -(-rows[:, :3] // self._each)
        holds = np.logical_and(rows[:, 3:] >= self._limits[..., 0], rows[:, 3:] <= self._limits[..., 1])
        runs = np.logical_and((grids > 0).all(1), holds.all(1))
        self.active: list[tuple[Launch, Dim, np.ndarray]] = [
            (launch, (g[0], g[1], g[2]), args) for launch, g, args, run in
            zip(self.launches, grids.tolist(), self.args, runs.tolist()) if run]
        self.recordable = len(self.active) > 1 and all(launch.kernel is not LIBRARY for launch, _, _ in self.active)
        self.key = tuple(self.sizes.products)

    def resize(self, values: Mapping[str, int]) -> None:
        sizes = self._settle()
        sizes.set(values)
        if self.key != tuple(sizes.products):           # of the last that were taken over whole, whatever came between (Ctrl-C)
            self._take_sizes()

    def _settle(self) -> Sizes:
        if self.key is None:
            self._write_words()
            self._take_sizes()
        assert self.sizes is not None
        return self.sizes

    def run(self, n_threads: int = 1, times: list[NodeTime] | None = None) -> None:
        self.aborted = False
        self._settle()
        with self.backend.turn:
            self._run(times)

    def abort(self) -> None:
        self.aborted = True

    def _run(self, times: list[NodeTime] | None) -> None:
        if times is not None:
            self._run_timed(times)
        elif not (self.backend.graphs and self.recordable):
            self._launch_all()
        else:
            graph = self.graphs.get(self.key)
            if graph is None and self.key in self.graphs:
                graph = self.graphs[self.key] = self._capture()
            if graph is None:
                self._remember()
                self._launch_all()
            else:
                self.graphs.move_to_end(self.key)
                self.device.replay(graph)

    def _remember(self) -> None:
        self.graphs[self.key] = None
        while len(self.graphs) > MAX_GRAPHS:
            self.graphs.popitem(last=False)

    def _capture(self) -> Any:
        self.device.begin_capture()
        try:
            self._launch_all()
        finally:
            graph = self.device.end_capture()
        return graph

    def _launch_all(self) -> None:
        for launch, grid, args in self.active:
            if self.aborted:
                raise Aborted("the run was aborted")
            self._launch(launch, grid, args)

    def _launch(self, launch: Launch, grid: Dim, args: np.ndarray) -> None:
        if launch.kernel is LIBRARY:
            self.device.multiply(args)
        else:
            self.device.launch(launch.kernel, grid, launch.block, launch.shared, args)

    def _run_timed(self, times: list[NodeTime]) -> None:
        for launch, grid, args in self.active:
            self.device.sync()
            start = time.perf_counter()
            self._launch(launch, grid, args)
            self.device.sync()
            times.append(NodeTime(launch.nodes, time.perf_counter() - start))


def padded(conditions: tuple[Condition, ...]) -> list[Condition]:
    """With conditions that always hold."""
    return [*conditions, *[(0, 0, 1 << 62)] * (MAX_CONDITIONS - len(conditions))]


def tensors(args: tuple[Arg, ...]) -> Iterator[Tensor]:
    """All among the arguments, also those within structs."""
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, tuple):
            yield from tensors(arg)

