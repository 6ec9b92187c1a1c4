"""The compute graph of one ubatch: nodes in execution order, its inputs and its named outputs.

In: tensors from the op table. Out: `Graph`, which the scheduler places and compiles. A graph is a pure function of its
key: whatever differs between two ubatches with equal keys is a graph input or a `Size`.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .ops import VIEWS
from .tensor import Tensor


class Graph:
    """`nodes` are in the order in which they run; leaves (weights, caches, inputs) are not among them."""

    def __init__(self) -> None:
        self.nodes: list[Tensor] = []
        self.inputs: list[Any] = []                    # inputs.Input, in the order of their creation
        self.outputs: dict[str, Tensor] = {}
        self._seen: set[Tensor] = set()

    def expand(self, tensor: Tensor) -> Tensor:
        """Append everything that `tensor` needs and does not stand yet, then itself."""
        stack, seen = [tensor], self._seen
        while stack:
            node, ready = stack[-1], True
            for s in reversed(node.src):
                if s is not None and s.op != "none" and s not in seen:
                    stack.append(s)
                    ready = False
            if ready:
                stack.pop()
                if node not in seen and node.op != "none":
                    seen.add(node)
                    self.nodes.append(node)
        return tensor

    def output(self, name: str, tensor: Tensor) -> None:
        self.outputs[name] = self.expand(tensor)

    def computed(self) -> Iterator[Tensor]:
        """Nodes that a backend has to run."""
        return (n for n in self.nodes if n.op not in VIEWS)

    def __str__(self) -> str:
        return "\n".join(map(repr, self.nodes))
