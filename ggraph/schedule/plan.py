"""A graph ready to run: its splits compiled on their backends, its inputs, its outputs; and the cache of plans.

In: a built graph. Out: `Plan.run(step)`. A plan is made once per graph key, at the largest sizes, and resized for the
batch at hand; keys and sizes come from the caller, the maths from the backends.
"""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from ..backend import Backend, Compiled, Device, NodeTime, Uneven
from ..graph import Graph
from ..size import Sizes
from ..tensor import Tensor
from . import alloc
from .assign import Home, assign
from .repeat import folds
from .split import Split, split
from .stage import Stage

Watch = Callable[[Tensor], bool]
See = Callable[["Plan", Tensor], None]


def cut(graph: Graph, backends: Sequence[Backend], home: Home, watched: Collection[Tensor] = ()) -> tuple[list[Split], list[Stage]]:
    """The splits of a graph, and what brings the inputs to devices. Nodes read the twins of their inputs from now on."""
    splits, staged = split(graph, assign(graph, backends, home), home, watched)
    return splits, [Stage(b, [(t, twin) for (device, t), twin in staged.items() if device is b]) for b in backends if not b.host]


class Layout:
    """The bytes that each device needs for what splits compute (`nbytes`), and the place of each result there. No memory is taken
    yet."""

    def __init__(self, graph: Graph, splits: Sequence[Split], stages: Sequence[Stage], backends: Sequence[Backend],
                 watched: Collection[Tensor] = ()):
        self.graph, self.splits, self.stages = graph, splits, stages
        device = {b: backends[-1] if b.host else b for b in backends}
        leaves = [t for i in graph.inputs for t in i.tensors]
        self.lives = alloc.lifetimes(splits, leaves, [*graph.outputs.values(), *watched], device)
        self.nbytes = alloc.allocate(self.lives, watched, {stage.backend: stage.largest for stage in stages})

    def settle(self, buffers: Mapping[Backend, Any]) -> None:
        """There is memory on each device."""
        for life in self.lives:
            life.tensor.buffer = buffers[life.device]
        for stage in self.stages:
            stage.settle(buffers[stage.backend])

    def backward(self) -> Iterator[tuple[Split, set[Tensor]]]:
        """From the last split to the first, each with what is read after it."""
        after: set[Tensor] = {t.root for t in self.graph.outputs.values()}
        for part in reversed(self.splits):
            yield part, after | ({part.watched.root} if part.watched else set())
            after |= {s.root for n in part.nodes for s in n.src if s is not None} | {s for s, _ in part.copies}


class Place(NamedTuple):
    """Where the host finds a tensor in its buffer, at the present sizes. `shape`: in NumPy's order."""
    offset: int
    nbytes: int
    shape: tuple[int, ...]


def _place(tensor: Tensor, sizes: Sequence[int]) -> Place:
    """`sizes`: its ne, nb and view_offs now."""
    n0, n1, n2, n3 = sizes[:4]
    return Place(tensor.root.offset + sizes[8], tensor.type.row_bytes(n0) * n1 * n2 * n3, (n3, n2, n1, n0))


class Plan:
    def __init__(self, graph: Graph, backends: Sequence[Backend], home: Home, arenas: Mapping[Backend, alloc.Arena],
                 watch: Watch | None = None):
        self.graph, self.backends = graph, backends
        watched = {n for n in graph.computed() if _visible(n) and watch(n)} if watch else set()
        self.splits, self.stages = cut(graph, backends, home, watched)
        self.owner: dict[Tensor, Backend] = {}          # of what is allocated here, where that is not the host
        self.moved = False                              # whether an arena had to grow, which makes other plans invalid
        self.compiled = self._by_repetition(arenas) or self._the_long_way(arenas, watched)
        reads = set().union(*(c.reads for c in self.compiled)) | {src for s in self.splits for src, _ in s.copies}
        sent = {t for stage in self.stages for t in stage.lay_out(reads)}
        self.inputs = [i for i in graph.inputs if any(t in reads or t in sent for t in i.tensors)]
        self._on_host = reads
        self.values: Mapping[str, int] | None = None
        self.seen = self._shown(watched)
        self._visible_sizes = Sizes([n for t in self.seen for n in (*t.ne, *t.nb, t.view_offs)])
        self._places: dict[Tensor, Place] = {}
        self._views: dict[Tensor, np.ndarray] = {}      # of what is in host memory, at these places

    def _shown(self, watched: Collection[Tensor]) -> list[Tensor]:
        """Tensors whose present shape the host asks for: outputs, watched nodes, copies."""
        return [*self.graph.outputs.values(), *watched, *(t for s in self.splits for pair in s.copies for t in pair)]

    def _by_repetition(self, arenas: Mapping[Backend, alloc.Arena]) -> list[Compiled] | None:
        """Plan a few of the layers that repeat; None where there are none, or where a plan is cut."""
        (part, *others), outputs = self.splits, self.graph.outputs.values()
        if others or part.watched or not part.backend.repeats:
            return None
        for fold in islice(folds(part.nodes, outputs), 2):
            with suppress(Uneven), fold.closed():
                self._allocate(arenas, [Split(part.backend, fold.nodes)])
                compiled = part.backend.compile(fold.nodes, {t.root for t in outputs}, fold.repeat)
                fold.spread()
                return [compiled]
        return None

    def _the_long_way(self, arenas: Mapping[Backend, alloc.Arena], watched: Collection[Tensor]) -> list[Compiled]:
        layout = self._allocate(arenas, self.splits, watched)
        return [part.backend.compile(part.nodes, keep) for part, keep in layout.backward()][::-1]

    def _allocate(self, arenas: Mapping[Backend, alloc.Arena], splits: Sequence[Split], watched: Collection[Tensor] = ()) -> Layout:
        """Places for everything."""
        layout = Layout(self.graph, splits, self.stages, self.backends, watched)
        moved = [arenas[b].reserve(n) for b, n in layout.nbytes.items()]
        self.moved |= any(moved)
        layout.settle({b: arenas[b].buffer for b in layout.nbytes})
        self.owner |= {life.tensor: life.device for life in layout.lives if not life.device.host}
        return layout

    def resize(self, values: Mapping[str, int]) -> bool:
        """Take over the sizes of the next batch; True if anything changed."""
        if values == self.values:
            return False
        begun, self.values = self.values is None, None          # None also where an interrupt comes before all of it is done
        for c in self.compiled:
            c.resize(values)
        if self._visible_sizes.update(values) or begun:
            rows = self._visible_sizes.numbers.reshape(-1, 9).tolist()
            self._places = {t: _place(t, row) for t, row in zip(self.seen, rows)}
            self._views.clear()
        self.values = dict(values)
        return True

    def fill(self, step: Any) -> None:
        host = self.backends[-1]
        for source in self.inputs:
            for tensor, data in zip(source.tensors, source.fill(step)):
                if tensor in self._on_host:
                    host.upload(tensor.buffer, tensor.offset, data)
                for stage in self.stages:
                    stage.take(tensor, data)
        for stage in self.stages:
            stage.send()

    def run(self, n_threads: int = 1, see: See | None = None, times: list[NodeTime] | None = None) -> None:
        """Run all splits; `see` is called after each watched node, the time of each step is appended to `times`."""
        for part, compiled in zip(self.splits, self.compiled):
            if part.copies:
                self._copy_in(part)
            compiled.run(n_threads, times)
            if part.watched is not None and see is not None:
                see(self, part.watched)

    def abort(self) -> None:
        """Stop the run, and no other, soon."""
        for compiled in self.compiled:
            compiled.abort()

    def _copy_in(self, part: Split) -> None:
        for source, twin in part.copies:
            data = self._bytes(source)
            part.backend.upload(twin.buffer, twin.offset, data)

    def _bytes(self, tensor: Tensor) -> np.ndarray:
        place, root = self._places[tensor], tensor.root
        return self.owner.get(root, self.backends[-1]).download(root.buffer, place.offset, place.nbytes)

    def _owner(self, tensor: Tensor) -> Backend:
        return self.owner.get(tensor.root, self.backends[-1])

    def array(self, tensor: Tensor) -> np.ndarray:
        """The present contents of an output or watched node: NumPy order; on the host a view, each time the same."""
        array = self._views.get(tensor)
        if array is None:
            dtype = tensor.type.np
            assert dtype is not None, f"{tensor!r} has no NumPy type"
            array = self._bytes(tensor).view(dtype).reshape(self._places[tensor].shape)
            if self._owner(tensor).host:
                self._views[tensor] = array
        return array

    def fetch(self, tensor: Tensor) -> Callable[[], np.ndarray]:
        """The bytes of an output as they are after this run: what reads them waits for them. The next run may be begun before."""
        place = self._places[tensor]
        return self._owner(tensor).fetch(tensor.root.buffer, place.offset, place.nbytes)

    def write(self, tensor: Tensor, data: np.ndarray) -> None:
        """Replace the contents of a watched node."""
        self._owner(tensor).upload(tensor.root.buffer, self._places[tensor].offset, np.ascontiguousarray(data))


def arena_bytes(graph: Graph, backend: Backend) -> int:
    """What the arena of a plan of this graph would take, if one backend ran it all."""
    return sum(Layout(graph, *cut(graph, [backend], lambda leaf: None), [backend]).nbytes.values())


def device_needs(graph: Graph, backends: Sequence[Backend], home: Home, device: Device) -> tuple[int, int, set[Tensor]]:
    """What a plan of this graph would take on a device, which stays as it is: bytes of the arena, bytes beside it, and the leaves
    that are read there."""
    layout = Layout(graph, *cut(graph, backends, home), backends)
    layout.settle({b: object() for b in layout.nbytes})
    parts = [(part.nodes, keep) for part, keep in layout.backward() if part.backend is device]
    reads = {s.root for nodes, _ in parts for n in nodes for s in n.src if s is not None and s.root.op == "none"}
    return layout.nbytes.get(device, 0), device.needs(parts), reads


def _visible(node: Tensor) -> bool:
    """Nodes with bytes of their own that NumPy can show; writes into a cache are not among them."""
    return node.root.op != "none" and node.type.plain


class PlanCache:
    """Plans by graph key, the least recently used dropped first."""

    def __init__(self, size: int = 32):
        self.size = size
        self.plans: OrderedDict[Hashable, Plan] = OrderedDict()
        self._last: tuple[Hashable, Plan | None] = None, None          # the next step's, mostly: equal is told faster than found

    def get(self, key: Hashable) -> Plan | None:
        if self._last[0] == key:
            return self._last[1]
        plan = self.plans.get(key)
        if plan is not None:
            self.plans.move_to_end(key)
            self._last = key, plan
        return plan

    def clear(self) -> None:
        self.plans.clear()
        self._last = None, None

    def put(self, key: Hashable, plan: Plan) -> Plan:
        """Keep it; the same plan."""
        if plan.moved:
            self.clear()
        self.plans[key] = plan
        self._last = key, plan
        while len(self.plans) > self.size:
            self.plans.popitem(last=False)
        return plan
