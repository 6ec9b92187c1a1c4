"""What GGRAPH_DEBUG shows on standard error: plans and splits, the time of every step, the values of every node.

In: plans, times, arrays. Out: lines, at the level they belong to. It changes nothing.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from . import env
from .backend import NodeTime
from .observe import by_step, weight_bytes
from .schedule.plan import Plan
from .tensor import Tensor

DEVICES, TIMES, GRAPH, VALUES = 1, 2, 3, 4


def opened(backends: Sequence[str], n_bytes: Mapping[str, int]) -> None:
    sizes = ", ".join(f"{name} {n / 2**20:.1f} MiB" for name, n in n_bytes.items())
    env.log(f"context on {' + '.join(backends)}: {sizes}", DEVICES)


def planned(plan: Plan) -> None:
    """A plan that was just built: its splits, and each node with what runs it."""
    if env.debug() < GRAPH:
        return
    env.log(f"plan of {len(plan.graph.nodes)} nodes in {len(plan.splits)} splits", GRAPH)
    for i, part in enumerate(plan.splits):
        copies = f", copies in {', '.join(t.name for t, _ in part.copies)}" if part.copies else ""
        env.log(f"split {i}: {len(part.nodes)} nodes on {part.backend.name}{copies}", GRAPH)
        for node in part.nodes:
            env.log(f"  {node!r}", GRAPH)


def timed(times: Sequence[NodeTime]) -> None:
    """Every step of a run: microseconds, the nodes that end in it, and GB/s where these read weights."""
    for ended, nodes, seconds in by_step(times):
        nbytes = weight_bytes(ended)
        rate = f" {nbytes / seconds / 1e9:7.1f} GB/s" if nbytes and seconds > 0 else ""
        names = " + ".join(f"{n.op} {n.name}" for n in ended) or f"before {nodes[-1].op} {nodes[-1].name}"
        env.log(f"{1e6 * seconds:10.1f} us  {names}{rate}", TIMES)
    env.log(f"{1e6 * sum(t.seconds for t in times):10.1f} us  in {len(times)} steps", TIMES)


def seen(name: str, array: np.ndarray, node: Tensor) -> None:
    """A node's values, for a hook: shape, extremes, mean over all of them, and the first few."""
    finite = array[np.isfinite(array)] if array.dtype.kind == "f" else array
    stats = f"min {finite.min():.6g} max {finite.max():.6g} mean {finite.mean():.6g}" if finite.size else "no finite value"
    odd = f", {array.size - finite.size} not finite" if finite.size < array.size else ""
    first = " ".join(f"{x:.5g}" for x in array.reshape(-1)[:4])
    env.log(f"{node.op} {name} {list(array.shape[::-1])}: {stats}{odd}; {first} ...", VALUES)
