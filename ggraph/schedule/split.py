"""Cut an assigned graph into splits: runs of nodes of one backend, with the tensors to copy in before each.

In: graph, assignment, the nodes to cut after (hooks). Out: `Split`s. Backends whose buffers are host memory share them:
between those there is a cut and no copy. What the host fills before a run is not copied split by split: a device has twins of
the inputs that it reads, and all of them are sent together.
"""
from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from ..backend import Backend, HostBuffer
from ..errors import BackendError
from ..graph import Graph
from ..tensor import Tensor, leaf
from .assign import Assignment, Home
from .order import together


@dataclass
class Split:
    """`copies` are (source on another backend, its twin here); `watched` is the node that a hook wants to see."""
    backend: Backend
    nodes: list[Tensor] = field(default_factory=list)
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    watched: Tensor | None = None


Staged = dict[tuple[Backend, Tensor], Tensor]        # (device, input) -> its twin there


def split(graph: Graph, chosen: Assignment, home: Home, watched: Collection[Tensor] = ()) -> tuple[list[Split], Staged]:
    """The splits in running order, and the twins of inputs."""
    splits: list[Split] = []
    part: Split | None = None
    for node in together(graph.computed()):
        if part is None or part.backend is not chosen[node] or part.watched is not None:
            part = Split(chosen[node])
            splits.append(part)
        part.nodes.append(node)
        if node in watched:
            part.watched = node
    inputs = {t for i in graph.inputs for t in i.tensors}
    staged: Staged = {}
    if len({part.backend for part in splits}) > 1 or not all(part.backend.host for part in splits):
        for part in splits:
            insert_copies(part, chosen, home, inputs, staged)
    return splits, staged


def insert_copies(part: Split, chosen: Assignment, home: Home, inputs: Collection[Tensor], staged: Staged) -> None:
    """Let the nodes of a split read twins of inputs, and of what another device computed."""
    twins: dict[Tensor, Tensor] = {}
    for node in part.nodes:
        node.src = tuple(src if src is None else _local(src, part, chosen, home, inputs, staged, twins) for src in node.src)


def _local(src: Tensor, part: Split, chosen: Assignment, home: Home, inputs: Collection[Tensor], staged: Staged,
           twins: dict[Tensor, Tensor]) -> Tensor:
    root, here = src.root, part.backend
    if root in inputs:
        return src if here.host else _seen_in(src, staged.setdefault((here, root), leaf(root.type, root.ne, root.name)))
    owner = chosen.get(root) or home(root)
    if owner is None or owner is here or (owner.host and here.host) or (root.op == "none" and mapped(root)):
        return src                                      # mapped weights are read by every backend
    if root.op == "none":
        raise BackendError(f"{root.name} is on {owner.name}, where an op that reads it cannot run; "
                           "keep it on the host: offload_kqv=False")
    if root not in twins:
        twins[root] = leaf(root.type, root.ne, root.name)
        part.copies.append((root, twins[root]))
    return _seen_in(src, twins[root])


def mapped(root: Tensor) -> bool:
    """A weight: its bytes lie in the mapped file, wherever a backend has its own copy."""
    return isinstance(root.buffer, HostBuffer) and not root.name.startswith("cache_")


def _seen_in(src: Tensor, twin: Tensor) -> Tensor:
    """The twin of a root, or the view of it that `src` is of the root."""
    if src.view_src is None:
        return twin
    return Tensor(src.op, src.type, src.ne, (twin,), src.params, src.nb, twin, src.view_offs, src.name)
