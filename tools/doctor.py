"""ggraph-doctor: what this machine and this installation can do, and what mends what does not work.

In: nothing. Out: findings on standard output, as text or JSON; exit code 1 where something that is used is broken. Without a
GPU, or without an optional package, nothing is broken.
"""
from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby

import click

import ggraph

from ._options import Command, group

_out = group("Output")
MARKS = {"ok": " ok ", "missing": " -- ", "broken": "FAIL"}


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@_out("--json", "as_json", is_flag=True, help="The findings as JSON: part, name, value, state (ok, missing, broken), remedy.")
@click.version_option(ggraph.__version__)
@click.pass_context
def main(ctx: click.Context, as_json: bool) -> None:
    """Look at Python, memory, cache folders, packages, CPU kernels and the GPU.

    What is marked FAIL is used and does not work; the line below says what mends it. What is marked -- is not there, and nothing
    uses it. Exit code: 0, or 1 if there is a FAIL.
    """
    findings = ggraph.diagnose()
    broken = [f for f in findings if f.state == "broken"]
    if as_json:
        click.echo(json.dumps({"ok": not broken, "findings": [f._asdict() for f in findings]}, indent=1))
    else:
        click.echo("\n".join(_text(findings)))
        click.echo(f"\n{len(broken)} broken: see FAIL above" if broken else "\nall that is used works")
    if broken:
        ctx.exit(1)


def _text(findings: Sequence[ggraph.Finding]) -> Iterator[str]:
    for part, found in groupby(findings, lambda f: f.part):
        yield f"{part}"
        for f in found:
            yield f"  [{MARKS[f.state]}] {f.name}: {f.value}"
            if f.remedy:
                yield f"           -> {f.remedy}"


if __name__ == "__main__":
    main()
