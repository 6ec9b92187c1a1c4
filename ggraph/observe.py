"""What one step was made of: the record that a Context hands to its observer, at the step's own sizes.

In: a step that has run and is not committed yet. Out: shapes of every node, contents of every input, times and bytes. It looks
and changes nothing; without an observer it is never made.
"""
from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .backend import NodeTime
from .memory import Step
from .schedule.plan import Plan
from .size import Sizes
from .tensor import Ne, Tensor


class Shape(NamedTuple):
    """Elements and byte strides of four axes, the contiguous one first, and the byte offset in the tensor that owns the bytes."""
    ne: Ne
    nb: Ne
    offset: int

    @property
    def n_rows(self) -> int:
        return self.ne[1] * self.ne[2] * self.ne[3]


def by_step(times: Sequence[NodeTime]) -> list[tuple[list[Tensor], Sequence[Tensor], float]]:
    """(nodes that end, nodes at work, seconds) of each step: a node that several steps work on ends in the last of them."""
    last = {node: i for i, (nodes, _) in enumerate(times) for node in nodes}
    return [([n for n in nodes if last[n] == i], nodes, seconds) for i, (nodes, seconds) in enumerate(times)]


@dataclass(frozen=True)
class Observed:
    """One graph run. `how`: its plan was "built", "resized" or "reused". `values`: the sizes that the plan was given, by name.
    `times`: what each of its steps took; `seconds`: all of it, with what lies between.

    It holds for as long as the observer runs: then the memory is as the step left it, and the inputs can still be told.
    """
    kind: str
    step: Step
    plan: Plan
    key: tuple[Hashable, ...]
    how: str
    values: Mapping[str, int]
    times: Sequence[NodeTime] = field(default_factory=list)
    seconds: float = 0.0

    @cached_property
    def shapes(self) -> dict[Tensor, Shape]:
        """Of every node and of everything that nodes read."""
        graph = self.plan.graph
        tensors = list(dict.fromkeys([t for n in graph.nodes for t in (n, n.root, *n.src) if t is not None]
                                     + [t for i in graph.inputs for t in i.tensors]))
        numbers = Sizes([number for t in tensors for number in (*t.ne, *t.nb, t.view_offs)]).set(self.values)
        rows = numbers.reshape(-1, 9).tolist()
        return {t: Shape(tuple(r[:4]), tuple(r[4:8]), r[8]) for t, r in zip(tensors, rows)}

    def inputs(self) -> dict[str, np.ndarray]:
        """What the graph was given, by name, each in NumPy order (the reverse of `ne`); also what no kernel reads."""
        return {t.name: np.asarray(data).reshape(self.shapes[t].ne[::-1])
                for source in self.plan.graph.inputs for t, data in zip(source.tensors, source.fill(self.step))}

    def steps(self) -> list[tuple[list[Tensor], Sequence[Tensor], float]]:
        """What `by_step` makes of the times."""
        return by_step(self.times)

    # --- bytes

    def nbytes(self, tensor: Tensor) -> int:
        """Of its elements, were they contiguous."""
        shape = self.shapes[tensor]
        return tensor.type.row_bytes(shape.ne[0]) * shape.n_rows

    def traffic(self, nodes: Sequence[Tensor]) -> int:
        """Bytes that a step of these nodes has to read and write: what comes from outside, and what it leaves behind."""
        inside, used = {n.root for n in nodes}, {s.root for n in nodes for s in n.src if s is not None}
        reads: dict[Tensor, int] = {}
        for operand, nbytes in (pair for n in nodes for pair in self._reads(n)):
            if operand.root not in inside or operand.root.op == "none":
                reads[operand.root] = nbytes
        left = [n for n in nodes if n.root not in used or n is nodes[-1]]
        return sum(reads.values()) + sum(self.nbytes(n) for n in left if n.op != "set_rows")

    def _reads(self, node: Tensor) -> Iterator[tuple[Tensor, int]]:
        """(operand, bytes of it that the node touches): rows by number are not the whole table."""
        for i, s in enumerate(node.src):
            if s is None:
                continue
            n, row = self.nbytes(s), s.type.row_bytes(self.shapes[s].ne[0])
            if node.op in ("get_rows", "set_rows") and i == 0:
                n = row * self._numel(node.src[1] if node.op == "get_rows" else node.src[2])
            elif node.op == "mul_mat_id" and i == 0:
                n = n * min(self._numel(node.src[2]), s.ne[2]) // s.ne[2]
            elif node.op == "flash_attn_ext" and i in (1, 2):
                n = n * self._cells(node, self.shapes[s].ne[1]) // max(1, self.shapes[s].ne[1])
            yield s, n

    def _cells(self, node: Tensor, n_kv: int) -> int:
        """How many of n_kv cells attention looks at: those in its list, if it has one."""
        listed = next((s for s in node.src if s is not None and s.name.startswith("kv_cells")), None)
        return n_kv if listed is None else min(n_kv, self._numel(listed))

    def _numel(self, tensor: Tensor) -> int:
        shape = self.shapes[tensor]
        return shape.ne[0] * shape.n_rows


def weight_bytes(nodes: Iterable[Tensor]) -> int:
    """Of the matrices that products among these nodes read."""
    return sum(int(s.nbytes) for n in nodes if n.op == "mul_mat" for s in n.src if s is not None and s.op == "none")
