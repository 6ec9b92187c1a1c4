"""Plots of reports as SVG that stands in a page: colours and text follow the page, light or dark.

In: numbers and labels. Out: SVG text. Needs matplotlib, from the extra `report`.
"""
from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

from markupsafe import Markup

import ggraph

COLOURS = {"#010101": "var(--ink)", "#020202": "var(--soft)", "#030303": "var(--line)", "#040404": "var(--s5)",
           "#050505": "var(--s1)", "#060606": "var(--s2)", "#070707": "var(--s4)", "#080808": "var(--bad)", "#090909": "var(--s3)"}
INK, SOFT, LINE, BLUE, ORANGE, VIOLET, GREEN, RED, YELLOW = COLOURS

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10, "text.color": INK, "legend.frameon": False,
    "axes.edgecolor": LINE, "axes.labelcolor": SOFT, "axes.titlecolor": INK, "axes.titlesize": 11.5, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "xtick.color": SOFT, "ytick.color": SOFT, "grid.color": LINE, "grid.linewidth": 0.8}


def plot(draw: Callable[[Any], None], title: str, x: str, y: str, size: tuple[float, float] = (7.2, 3.4)) -> Markup:
    """`draw(axes)` in a figure of `size` inches, as an SVG element whose colours are the page's."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ggraph.Error("plots need matplotlib; install it with: pip install 'ggraph-runtime[report]'") from e
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": title}):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        axes.set_title(title, pad=10)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(axis="y")
        draw(axes)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    svg = re.sub(r"^.*?(?=<svg)", "", out.getvalue(), flags=re.S)
    for colour, variable in COLOURS.items():
        svg = svg.replace(colour, variable)
    svg = re.sub(r"font: ([^;\"]*?)'sans-serif'[^;\"]*", r"font: \1 var(--sans)", svg)
    prefix = re.sub(r"\W+", "-", title)
    return Markup(re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{prefix}-", svg))


def bars(labels: Sequence[str], values: Sequence[float], title: str, x: str, *, log: bool = False, colour: str = BLUE) -> Markup:
    """Horizontal bars, the first on top."""
    def draw(axes: Any) -> None:
        axes.barh(range(len(values)), values, color=colour, height=0.68)
        axes.set_yticks(range(len(values)), labels, fontsize=9)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x")
        if log:
            axes.set_xscale("log")
    return plot(draw, title, x, "", (7.2, 0.8 + 0.24 * max(len(values), 3)))
