"""The order in which a graph's nodes run, where its own is not the best.

In: nodes in an order that is right. Out: the same, in another that is right too. It knows no backends.
"""
from __future__ import annotations

from collections.abc import Iterable

from ..ops import VIEWS
from ..tensor import Tensor


def together(nodes: Iterable[Tensor]) -> list[Tensor]:
    """Products of weights with the same activations (Q, K and V; gate and up) stand side by side, where the first of them
    stood, so that a backend can run them as one."""
    nodes = list(nodes)
    changed = {n.view_src for n in nodes if n.view_src is not None and n.op not in VIEWS}       # written more than once
    products: dict[Tensor, list[Tensor]] = {}           # of these activations, in order
    runs: dict[Tensor, list[Tensor]] = {}               # by their first
    for node in nodes:
        if node.op == "mul_mat" and node.src[0].op == "none" and (x := node.src[1]).root not in changed:
            run = products.setdefault(x, [])
            run.append(node)
            runs[node] = run if run[0] is node else []
    out: list[Tensor] = []
    for node in nodes:
        if node in runs:
            out += runs[node]
        else:
            out.append(node)
    return out
