"""What ggraph-diff found, as text: the verdict, the next tokens, the tensors and nodes with the largest errors."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ._tables import WIDTH

if TYPE_CHECKING:
    from .diff import Diff, Side


def show(d: Diff, n: int) -> None:
    console = Console()
    console = console if console.is_terminal else Console(width=WIDTH)
    console.print(f"A {escape(name(d.a))}\nB {escape(name(d.b))}", highlight=False)
    console.print(f"{len(d.tokens)} tokens: mean KL divergence {d.kld:.4g} nats, same likeliest token {100 * d.top_same:.1f}%; "
                  f"first node with an error above {d.mark:g}: {escape(d.first or 'none')}", highlight=False)
    differing = sorted((t for t in d.tensors if not t.same), key=lambda t: -t.block_nmse)
    if d.tensors:
        console.print(table(f"tensors that differ ({len(differing)} of {len(d.tensors)})",
                            ("A", "B", "NMSE", "max", "worst block", "blocks"),
                            ((t.name, t.type_a, t.type_b, f"{t.nmse:.3g}", f"{t.max_abs:.3g}", f"{t.block_nmse:.3g} in {t.block}",
                              f"{t.n_blocks}") for t in differing[:n])))
    console.print(table("nodes, by the error they add", ("op", "added NMSE", "worst channel", "total NMSE", "cosine", "max"),
                        ((x.name, x.op, f"{x.local_nmse:.3g}", f"{x.channel_nmse:.3g} in {x.channel}", f"{x.nmse:.3g}",
                          f"{x.cosine:.6f}", f"{x.max_abs:.3g}") for x in sorted(d.nodes, key=lambda x: -x.local_nmse)[:n])))
    if d.swaps:
        console.print(table("one tensor of B in A", ("at node", "A", "B", "KL divergence", "likeliest changed"),
                            ((s.tensor, s.node, s.type_a, s.type_b, f"{s.kld:.4g}", f"{100 * s.top_changed:.1f}%")
                             for s in d.swaps[:n])))
    for failure in d.failures[:max(n, 1)]:
        console.print(f"[red]FAIL[/] {escape(failure.text)}; the limit is {failure.limit:g}", highlight=False)
    console.print("[green]PASS[/]" if d.passed else f"[red]FAIL[/]: {len(d.failures)} beyond the limits")


def name(side: Side) -> str:
    """The file's name and what is not as usual."""
    usual = type(side)(side.path)
    return Path(side.path).name + "".join(f", {k} {v}" for k, v in vars(side).items() if v != getattr(usual, k))


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    made = Table(title, *columns, box=None)
    for row in rows:
        made.add_row(*map(escape, row))
    return made
