"""Which backend runs which node. In: a graph, the backends in order of preference, homes of leaves. Out: an assignment.

Where weights and caches live wins; the rest follows along the graph; what a backend lacks goes to the last one, the host.
Each pass is a function of (graph, assignment).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

from ..backend import Backend
from ..errors import BackendError
from ..graph import Graph
from ..tensor import Tensor

Assignment = dict[Tensor, Backend]                   # computed nodes only
Home = Callable[[Tensor], "Backend | None"]          # of a weight or cache; None: it has none


def assign(graph: Graph, backends: Sequence[Backend], home: Home) -> Assignment:
    host = backends[-1]
    if len(backends) == 1:
        chosen: Assignment = dict.fromkeys(graph.computed(), host)
    else:
        chosen = by_leaves(graph, home)
        spread_forward(graph, chosen)
        spread_backward(graph, chosen, host)
    to_host(chosen, host)
    return chosen


def by_leaves(graph: Graph, home: Home) -> Assignment:
    """Nodes that read a weight or a cache run where it lives."""
    chosen: Assignment = {}
    for node in graph.computed():
        for src in node.src:
            place = home(src.root) if src is not None and src.root.op == "none" else None
            if place is not None:
                chosen[node] = place
                break
    return chosen


def spread_forward(graph: Graph, chosen: Assignment) -> None:
    """A node with no home of its own runs where its first placed source was computed."""
    for node in graph.computed():
        if node not in chosen:
            for src in node.src:
                if src is not None and src.root in chosen:
                    chosen[node] = chosen[src.root]
                    break


def spread_backward(graph: Graph, chosen: Assignment, host: Backend) -> None:
    """What is left runs where its result is first used, else on the host."""
    first_use: dict[Tensor, Backend] = {}
    for node in reversed(list(graph.computed())):
        place = chosen.setdefault(node, first_use.get(node, host))
        for src in node.src:
            if src is not None:
                first_use[src.root] = place


def to_host(chosen: Assignment, host: Backend) -> None:
    for node, backend in chosen.items():
        if not backend.supports(node):
            if backend is host or not host.supports(node):
                raise BackendError(f"no backend runs {node!r}")
            chosen[node] = host
