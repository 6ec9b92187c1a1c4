"""Cut an assigned graph into splits: runs of nodes of one backend, with the tensors to copy in before each.

In: graph, assignment, the nodes to cut after (hooks). Out: `Split`s. Backends whose buffers are host memory share them:
between those there is a cut and no copy.
"""
from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from ..backend import Backend
from ..graph import Graph
from ..tensor import Tensor, leaf
from .assign import Assignment
from .order import together


@dataclass
class Split:
    """`copies` are (source on another backend, its twin here); `watched` is the node that a hook wants to see."""
    backend: Backend
    nodes: list[Tensor] = field(default_factory=list)
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    watched: Tensor | None = None


def split(graph: Graph, chosen: Assignment, watched: Collection[Tensor] = ()) -> list[Split]:
    splits: list[Split] = []
    for node in together(graph.computed()):
        if not splits or splits[-1].backend is not chosen[node] or splits[-1].watched is not None:
            splits.append(Split(chosen[node]))
        splits[-1].nodes.append(node)
        if node in watched:
            splits[-1].watched = node
    for part in splits:
        insert_copies(part, chosen)
    return splits


def insert_copies(part: Split, chosen: Assignment) -> None:
    """Let the nodes of a split read twins of what another device computed."""
    twins: dict[Tensor, Tensor] = {}
    for node in part.nodes:
        node.src = tuple(src if src is None else _local(src, part, chosen, twins) for src in node.src)


def _local(src: Tensor, part: Split, chosen: Assignment, twins: dict[Tensor, Tensor]) -> Tensor:
    root = src.root
    owner = chosen.get(root)
    if owner is None or owner is part.backend or (owner.host and part.backend.host):
        return src
    if root not in twins:
        twins[root] = leaf(root.type, root.ne, root.name)
        part.copies.append((root, twins[root]))
    if src is root:
        return twins[root]
    return Tensor(src.op, src.type, src.ne, (twins[root],), src.params, src.nb, twins[root], src.view_offs, src.name)
