"""What ggraph-diff found as a page with plots. In: a `Diff`. Out: the page."""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from ._diff_tables import name
from ._plots import BLUE, ORANGE, RED, SOFT, bars, plot
from ._report import render

if TYPE_CHECKING:
    from .diff import Diff, Position

LEAST = 1e-12                   # what a logarithmic axis shows of zero
N_BARS, N_ROWS = 24, 30


def page(d: Diff) -> str:
    return render("diff", d=d, **parts(d))


def parts(d: Diff) -> dict[str, Any]:
    """What the templates of ggraph-diff and ggraph-report show of it."""
    differing = sorted((t for t in d.tensors if not t.same), key=lambda t: -t.block_nmse)
    nodes = sorted(d.nodes, key=lambda n: -n.local_nmse)
    return {"name_a": name(d.a), "name_b": name(d.b), "plots": plots(d), "differing": differing[:N_ROWS],
            "n_differing": len(differing), "nodes": nodes[:N_ROWS], "positions": worst(d.positions)}


def worst(positions: list[Position], n: int = 8) -> list[Position]:
    """Where the next token differs most, in the order of the text."""
    at = sorted(range(len(positions)), key=lambda i: -positions[i].kld)[:n]
    return [positions[i] for i in sorted(at)]


def plots(d: Diff) -> list[tuple[Markup, str]]:
    """(picture, what it says)"""
    found = [(growth(d), "How far B is from A behind each layer when each runs on with its own values; and what each layer adds "
                         "when B is given A's values (the largest of its nodes)."),
             (kld(d), "How much B's distribution of the next token differs from A's, after each token of the prompt.")]
    if d.swaps:
        top = d.swaps[:N_BARS]
        labels = [f"{s.tensor.removesuffix('.weight')} ({s.type_b})" for s in top]
        found.append((bars(labels, [max(s.kld, LEAST) for s in top], "Effect of one tensor of B in A", "mean KL divergence, nats"),
                      "All else is A: what the tensor alone does to the next token."))
    adds = sorted((n for n in d.nodes if n.weights), key=lambda n: -n.local_nmse)[:N_BARS]
    if any(n.local_nmse for n in adds):
        found.append((bars([n.name for n in adds], [max(n.local_nmse, LEAST) for n in adds], "Error that a node adds",
                           "NMSE of B's result for A's values", colour=ORANGE), "Products and other nodes that read weights."))
    return found


def growth(d: Diff) -> Markup:
    """Total and added error by layer."""
    last = {n.layer: n for n in d.nodes if n.layer is not None}
    layers = sorted(last)
    total = [max(last[il].nmse, LEAST) for il in layers]
    added = [max(max(n.local_nmse for n in d.nodes if n.layer == il), LEAST) for il in layers]

    def draw(axes: Any) -> None:
        axes.plot(layers, total, color=BLUE, marker="o", markersize=3, label="behind the layer (total)")
        axes.plot(layers, added, color=ORANGE, marker="o", markersize=3, label="added by its worst node")
        axes.axhline(d.mark, color=SOFT, linewidth=1, linestyle="--")
        axes.set_yscale("log")
        axes.legend(fontsize=9)
    return plot(draw, "Error by layer", "layer", "NMSE")


def kld(d: Diff) -> Markup:
    values = [p.kld for p in d.positions]

    def draw(axes: Any) -> None:
        colours = [BLUE if p.same_top else RED for p in d.positions]
        axes.bar(range(len(values)), values, color=colours, width=0.8)
        axes.axhline(d.kld, color=SOFT, linewidth=1, linestyle="--")
        if not math.isclose(max(values, default=0), 0):
            axes.annotate(f"mean {d.kld:.3g}", (1, 1), xycoords="axes fraction", xytext=(0, 4), textcoords="offset points",
                          ha="right", fontsize=9)                   # above the bars, which it would cross
    return plot(draw, "Next token by position (red: another likeliest token)", "position in the prompt", "KL divergence, nats")
