"""What ggraph-report found as one page with plots. In: a `Report`. Out: the page."""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from ._diff_page import LEAST, parts
from ._plots import BLUE, GREEN, ORANGE, RED, SOFT, VIOLET, YELLOW, bars, plot
from ._report import render

if TYPE_CHECKING:
    from .report import Report

PALETTE = (BLUE, ORANGE, VIOLET, GREEN, YELLOW, SOFT, RED)


def page(r: Report) -> str:
    names = {"name": Path(r.path).name, "base": Path(r.base).name if r.base else None}
    return render("report", r=r, d=r.diff, pictures=pictures(r), **names, **parts(r.diff))


def pictures(r: Report) -> list[tuple[Markup, str]]:
    found = [(layers(r), "Bytes of each layer, by the type that they really have."),
             (running(r), "Perplexity of the text so far; it settles as more of it is read.")]
    if r.divergence:
        found.append((histogram(r), "Each predicted token once: how far its distribution is from the base's."))
    found.append((bars([s.name for s in r.speeds], [s.per_second for s in r.speeds], "Speed", "tokens per second", colour=GREEN),
                  "pp: reading a prompt; tg: writing. Measured on this machine with all cores."))
    return found


def layers(r: Report) -> Markup:
    kinds = sorted(r.size.types, key=lambda t: -r.size.types[t])

    def draw(axes: Any) -> None:
        bottom = [0.0] * len(r.size.layers)
        for kind, colour in zip(kinds, PALETTE * 3):
            values = [layer.get(kind, 0) / 2**20 for layer in r.size.layers]
            if any(values):
                axes.bar(range(len(values)), values, bottom=bottom, color=colour, label=kind, width=0.8)
            bottom = [a + b for a, b in zip(bottom, values)]
        axes.set_ylim(0, 1.25 * max(bottom, default=1.0))
        axes.legend(fontsize=9, ncols=4, loc="upper left")
    return plot(draw, "Size of the layers", "layer", "MiB")


def running(r: Report) -> Markup:
    values = r.perplexity.running

    def draw(axes: Any) -> None:
        axes.plot(range(1, len(values) + 1), values, color=BLUE, marker="o", markersize=4)
        axes.axhline(r.perplexity.ppl.value, color=SOFT, linewidth=1, linestyle="--")
        axes.set_xticks(range(1, len(values) + 1, max(1, len(values) // 8)))
        axes.margins(y=0.3)
    return plot(draw, "Perplexity", f"pieces of {r.perplexity.n_ctx} tokens read", "perplexity")


def histogram(r: Report) -> Markup:
    assert r.divergence
    import numpy as np
    values = np.maximum(np.asarray(r.divergence.kld_values, np.float64), LEAST)
    edges = np.geomspace(max(float(np.quantile(values, 0.001)), 1e-8), float(values.max()) * 1.01, 40)
    mean = r.divergence.kld.value

    def draw(axes: Any) -> None:
        axes.hist(values, bins=list(edges), color=VIOLET)
        axes.axvline(mean, color=SOFT, linewidth=1, linestyle="--")
        axes.annotate(f"mean {mean:.3g}", (mean, 1), xycoords=("data", "axes fraction"), xytext=(4, -10),
                      textcoords="offset points", fontsize=9)
        axes.set_xscale("log")
    return plot(draw, "Distance of the next token's distribution", "KL divergence, nats", "tokens")
