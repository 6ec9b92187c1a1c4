"""A trace as text: for each step what it ran, the five variables, the cells, the mask and the slowest nodes.

In: a `Trace`. Out: tables on standard output, in colour on a terminal.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ._record import Node, Pool, Row, States, StepTrace, Variable, trimmed

if TYPE_CHECKING:
    from .tracing import Run, Trace

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
ROLES = {"hidden": "hidden states", "positions": "positions, rotation", "mask": "mask", "memory": "memory", "decode": "decoding"}
WIDTH, N_MASK = 132, 96             # of output that goes to no terminal; tokens and cells of a mask that are drawn


def show(found: Trace, n_nodes: int) -> None:
    console = Console()
    console = console if console.is_terminal else Console(width=WIDTH)
    m = found.model
    layers = f"{len(m['kv_layers'])} layers with KV" + (f", {len(m['state_layers'])} with a state" if m["state_layers"] else "")
    console.print(f"[bold]{escape(m['name'])}[/]: {m['arch']}, {m['n_params'] / 1e6:.1f} M parameters, {m['n_layer']} layers "
                  f"({layers}), n_embd {m['n_embd']}, n_vocab {m['n_vocab']}", highlight=False)
    for run in found.runs:
        console.rule(f"[bold]{run.case}[/], {run.kv} KV")
        console.print(escape(run.about), style="dim")
        console.print(summary(run))
        for step in run.steps:
            console.print(Panel(Group(*details(step, n_nodes)), title=escape(title(step)), title_align="left"))


def title(step: StepTrace) -> str:
    part = f", ubatch {step.ubatch} of {step.n_ubatch}" if step.n_ubatch > 1 else ""
    return f"{step.label}{part}: {len(step.tokens)} tokens, {step.ms:.2f} ms"


def summary(run: Run) -> Table:
    """One line a step."""
    table = Table("step", "tokens", "n_kv", "cells", "KV bytes", "state bytes", "graph", "plan", "splits", "nodes", "ms", box=None)
    for s in run.steps:
        label = s.label + (f" ({s.ubatch}/{s.n_ubatch})" if s.n_ubatch > 1 else "")
        table.add_row(label, str(len(s.tokens)), ", ".join(str(p.n_kv) for p in s.pools) or "-",
                      ", ".join(str(p.used) for p in s.pools) or "-", f"{sum(p.bytes_used for p in s.pools):,}",
                      f"{s.states.bytes_used:,}" if s.states else "-", str(s.graph), s.how,
                      " + ".join(f"{x.n_nodes} on {x.backend}" for x in s.splits), str(len(s.nodes)), f"{s.ms:.2f}")
    return table


def details(step: StepTrace, n_nodes: int) -> Iterator[RenderableType]:
    yield tokens(step)
    yield Text("key: " + ", ".join(step.key), style="dim")
    yield five(step.variables)
    for pool in step.pools:
        yield from cells(pool)
    if step.states:
        yield rows(step.states)
    for mask in step.masks:
        yield Text(f"{mask.name}: a row for each token, a column for each cell")
        for i, stream in enumerate(mask.rows):
            yield picture(stream, i, len(mask.rows))
    if step.outputs:
        yield outputs(step.outputs)
    yield slowest(step.nodes, n_nodes)
    for line in step.after:
        yield Text("then " + line, style="bold")


def tokens(step: StepTrace) -> Text:
    text = Text()
    for t in step.tokens:
        style = f"{colour(t.seqs)} reverse" if t.output else colour(t.seqs)
        text.append(f"{t.text!r}@{t.pos[0]}", style).append(" ")
    return text


def colour(seqs: Sequence[int]) -> str:
    return COLOURS[seqs[0] % len(COLOURS)] if len(seqs) == 1 else "white"


def five(variables: Sequence[Variable]) -> Table:
    table = Table("variable", "tensor", "op", "type", "logical shape", "strides", "owner: physical shape", "in", "", box=None)
    before = ""
    for v in sorted(variables, key=lambda v: list(ROLES).index(v.role)):
        owner = v.owner or "itself"
        table.add_row(ROLES[v.role] if v.role != before else "", name(v), v.op, v.type, shape(v.ne), strides(v),
                      f"{owner} {shape(v.physical)}", v.where, escape(v.note))
        before = v.role
    return table


def name(v: Variable) -> str:
    """The tensor, and which layers it stands for."""
    return escape(v.name) + (f" [{len(v.layers)}x: {ranges(v.layers)}]" if len(v.layers) > 1 else "").replace("[", r"\[")


def ranges(numbers: Sequence[int]) -> str:
    """0 1 2 5 as "0-2 5"."""
    out: list[list[int]] = []
    for n in sorted(set(numbers)):
        if out and n == out[-1][-1] + 1:
            out[-1][1:] = [n]
        else:
            out.append([n])
    return " ".join("-".join(map(str, r)) for r in out)


def shape(ne: Sequence[int]) -> str:
    return r"\[" + ", ".join(map(str, trimmed(list(ne)))) + "]"


def strides(v: Variable) -> str:
    """In bytes, of the axes that the shape shows."""
    n = 1 + max((i for i, x in enumerate(v.ne) if x != 1), default=0)
    return ", ".join(map(str, v.nb[:n]))


def cells(pool: Pool) -> Iterator[Text]:
    window = f", window {pool.window}" if pool.window else ""
    yield Text(f"KV cells of {len(pool.layers)} layers ({ranges(pool.layers)}{window}): {pool.used} used, {pool.n_kv} read, "
               f"{pool.size} there are; digits are the sequence, * is shared, reversed is new")
    for s in pool.streams:
        text, written = Text(f"  stream {s.stream}: "), set(s.written)
        for i, owners in enumerate(s.owners):
            sign = "." if not owners else str(owners[0]) if len(owners) == 1 else "*"
            text.append(sign, (colour(owners) if owners else "dim") + (" reverse" if i in written else ""))
        yield text if s.owners else text.append("empty", "dim")


def rows(states: States) -> Text:
    kept = "; ".join(f"sequence {i}: " + ", ".join(f"position {pos} in row {row}" for pos, row in marks)
                     for i, marks in enumerate(states.marks) if marks)
    return Text(f"state rows of {len(states.layers)} layers ({ranges(states.layers)}): read {states.src}, "
                f"written {states.dst}; {kept}")


def picture(mask: Sequence[str], stream: int, n_stream: int) -> Text:
    text = Text()
    for i, row in enumerate(mask[:N_MASK]):
        text.append(("\n" if i else "") + (f"  {stream} " if n_stream > 1 else "  "))
        text.append(row[:N_MASK].replace("1", "█").replace("0", "·"))
    return text


def outputs(found: Sequence[Row]) -> Table:
    table = Table("output row", "sequence", "position", "likeliest next tokens", "", box=None)
    for row in found:
        table.add_row(str(row.row), ", ".join(map(str, row.seqs)), str(row.pos),
                      escape("  ".join(f"{text!r} {100 * p:.1f}%" for _, text, p in row.top)), escape(row.note))
    return table


def slowest(nodes: Sequence[Node], n: int) -> Table:
    total = sum(node.us for node in nodes) or 1.0
    table = Table(f"slowest of {len(nodes)} nodes", "op", "weights", "shape", "us", "share", "GB/s", box=None)
    for column in table.columns[4:]:
        column.justify = "right"
    for node in sorted(nodes, key=lambda node: -node.us)[:n]:
        table.add_row(escape(joined(node.names)), joined(node.ops), node.type, shape(node.ne), f"{node.us:.1f}",
                      f"{100 * node.us / total:.1f}%", f"{node.gb_s:.1f}")
    return table


def joined(names: Sequence[str]) -> str:
    """Those that have a name, each once."""
    return " + ".join(dict.fromkeys(n for n in names if n)) or "-"
