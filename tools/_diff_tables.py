"""What ggraph-diff found, as text: the verdict, the next tokens, the tensors and nodes with the largest errors."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ._tables import WIDTH

if TYPE_CHECKING:
    from ._tensors import TensorError
    from .diff import Diff, Side


def show(d: Diff, n: int) -> None:
    console = Console()
    console = console if console.is_terminal else Console(width=WIDTH)
    console.print(f"A {escape(name(d.a))}\nB {escape(name(d.b))}", highlight=False)
    console.print(f"{len(d.tokens)} tokens: mean KL divergence {d.kld:.4g} nats, same likeliest token {100 * d.top_same:.1f}%; "
                  f"first node with an error above {d.mark:g}: {escape(d.first or 'none')}", highlight=False)
    differing = sorted((t for t in d.tensors if not t.same), key=lambda t: -t.block_nmse)
    left_out: set[str] = set()
    for title, made, out in tables(d, differing, n, console.width):
        console.print(f"[bold]{title}[/]", highlight=False)
        console.print(made)
        left_out |= set(out)
    if left_out:
        console.print(f"no room for: {', '.join(sorted(left_out))} (--json has all)", highlight=False)
    for failure in d.failures[:max(n, 1)]:
        console.print(f"[red]FAIL[/] {escape(failure.text)}; the limit is {failure.limit:g}", highlight=False)
    console.print("[green]PASS[/]" if d.passed else f"[red]FAIL[/]: {len(d.failures)} beyond the limits")


def name(side: Side) -> str:
    """The file's name and what is not as usual."""
    usual = type(side)(side.path)
    return Path(side.path).name + "".join(f", {k} {v}" for k, v in vars(side).items() if v != getattr(usual, k))


def tables(d: Diff, differing: Sequence[TensorError], n: int, width: int) -> Iterator[tuple[str, Table, Sequence[str]]]:
    """Titles and tables that fit `width`, each with the columns for which there is no room."""
    if d.tensors:
        rows = [(t.name, t.type_a, t.type_b, f"{t.nmse:.3g}", f"{t.max_abs:.3g}", f"{t.block_nmse:.3g} in {t.block}",
                 f"{t.n_blocks}") for t in differing[:n]]
        yield f"tensors that differ ({len(differing)} of {len(d.tensors)})", *table(
            ("A", "B", "NMSE", "max", "worst block", "blocks"), rows, width, ("worst block", "NMSE", "B", "A", "max"))
    rows = [(x.name, x.op, f"{x.local_nmse:.3g}", f"{x.channel_nmse:.3g} in {x.channel}", f"{x.nmse:.3g}", f"{x.cosine:.6f}",
             f"{x.max_abs:.3g}") for x in sorted(d.nodes, key=lambda x: -x.local_nmse)[:n]]
    yield "nodes, by the error they add", *table(("op", "added NMSE", "worst channel", "total NMSE", "cosine", "max"), rows, width,
                                                 ("added NMSE", "total NMSE", "worst channel", "op", "cosine"))
    if d.swaps:
        swaps = [(s.tensor, s.node, s.type_a, s.type_b, f"{s.kld:.4g}", f"{100 * s.top_changed:.1f}%") for s in d.swaps[:n]]
        yield "one tensor of B in A", *table(("at node", "A", "B", "KL divergence", "likeliest changed"), swaps, width,
                                             ("KL divergence", "likeliest changed", "B", "A"))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, first: Sequence[str]) -> tuple[Table, Sequence[str]]:
    """The first cell of each row is its name. Columns have room in this order: `first`, then the others."""
    widths = [max(map(len, cells)) + 2 for cells in zip(("", *columns), *rows)]
    room = width + 2 - widths[0]                # no space at the edges
    shown: set[str] = set()
    for name in sorted(columns, key=lambda c: first.index(c) if c in first else len(first)):
        size = widths[1 + columns.index(name)]
        if size <= room:
            room -= size
            shown.add(name)
    made = Table("", box=None, pad_edge=False)
    for name in columns:
        if name in shown:
            made.add_column(name, no_wrap=True)
    for row in rows:
        made.add_row(escape(row[0]), *(escape(cell) for name, cell in zip(columns, row[1:]) if name in shown))
    return made, [name for name in columns if name not in shown]
