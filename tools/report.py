"""ggraph-report: one page about a model file: is it healthy, how well does it predict, how fast is it, what did quantization do.

In: a file, possibly the one that it was made from. Out: a page with plots, or JSON. It runs what ggraph-check, ggraph-perplexity,
ggraph-bench and ggraph-diff run.
"""
from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

import ggraph
from ggraph import env, gguf, hub

from . import bench, perplexity
from ._console import Bars
from ._estimate import Divergence, Perplexity
from ._finding import ERROR
from ._options import Command, IntRange, group, options
from ._output import check_target, write_text
from ._runners import Params as Setting
from .check import Health, check
from .diff import Diff, Side, diff

Progress = Callable[[str, int, int], None]
MAX_KLD = 0.1


@dataclass(frozen=True)
class Speed:
    """Tokens per second of one test (as ggraph-bench names it): median, and the standard deviation."""
    name: str
    per_second: float
    deviation: float


@dataclass(frozen=True)
class Size:
    """Of the file, by type; `layers`: bytes of each layer, by type."""
    nbytes: int
    n_params: int
    types: dict[str, int]
    layers: list[dict[str, int]]

    @property
    def bits(self) -> float:
        """Bits per weight."""
        return 8 * sum(self.types.values()) / max(self.n_params, 1)


@dataclass(frozen=True)
class Report:
    """`divergence` and a `diff` of two files only with a base; without one, `diff` is of the two forms of attention."""
    path: str
    base: str | None
    size: Size
    health: Health
    perplexity: Perplexity
    divergence: Divergence | None
    speeds: list[Speed]
    diff: Diff

    @property
    def troubles(self) -> list[str]:
        """What speaks against the file."""
        found = [f"{f.tensor or f.key or f.what}: {f.message}" for f in self.health.findings if f.severity == ERROR]
        if self.divergence and self.divergence.kld.value > MAX_KLD:
            found.append(f"its next tokens are {self.divergence.kld.value:.3g} nats from the base's on average; "
                         f"the limit is {MAX_KLD:g}")
        return found + [f.text for f in self.diff.failures if f.what in ("block", "channel")]

    def json(self) -> dict[str, Any]:
        values: dict[str, Any] = {"path": self.path, "base": self.base, "troubles": self.troubles, "size": asdict(self.size),
                                  "health": self.health.json(), "perplexity": self.perplexity.json(),
                                  "divergence": self.divergence.json() if self.divergence else None,
                                  "speeds": [asdict(s) for s in self.speeds], "diff": self.diff.json()}
        return values


def report(path: str | Path, base: str | Path | None = None, *, n_ctx: int = 512, n_chunks: int = 4, n_swap: int = 16,
           repetitions: int = 3, progress: Progress | None = None) -> Report:
    """Run everything. `n_chunks` pieces of `n_ctx` tokens of the text that comes with ggraph are predicted."""
    tell = progress or (lambda what, done, total: None)
    path, base = str(path), str(base) if base else None
    health = check(path, progress)
    with ggraph.Model(path) as model:
        size = sizes(model.file)
        text = perplexity.TEXT.read_text(encoding="utf-8")
        tokens = model.vocab.encode(text)[:n_ctx * max(n_chunks, 2)]       # windows need a text of two
        options: dict[str, Any] = {
            "n_ctx": n_ctx, "n_chunks": n_chunks, "progress": lambda done, total, so_far: tell("windows", done, total)}
        ppl = perplexity.perplexity(model, tokens, **options)
        div = None
        if base:
            with ggraph.Model(base) as other:
                div = perplexity.divergence(model, other, tokens, **options)
    other_side = (Side(base), Side(path)) if base else (Side(path, flash_attn="off"), Side(path, flash_attn="on"))
    compared = diff(*other_side, n_swap=n_swap, progress=progress)
    return Report(path, base, size, health, ppl, div, speeds(path, repetitions, tell), compared)


def sizes(file: gguf.File) -> Size:
    types: dict[str, int] = {}
    layers: dict[int, dict[str, int]] = {}
    for name, t in file.tensors.items():
        types[t.type.name] = types.get(t.type.name, 0) + t.nbytes
        if name.startswith("blk."):
            layer = layers.setdefault(int(name.split(".")[1]), {})
            layer[t.type.name] = layer.get(t.type.name, 0) + t.nbytes
    return Size(file.size, sum(t.n_elements for t in file.tensors.values()), types, [layers[il] for il in sorted(layers)])


def speeds(path: str, repetitions: int, tell: Progress) -> list[Speed]:
    """Of reading 256 tokens and of writing 32, with all cores."""
    setting = Setting(path, 2048, 512, os.cpu_count() or 1, "f16", "f16", True, 0)
    found = []
    tests = [bench.Test(setting, 256, 0, 0, 1), bench.Test(setting, 0, 32, 0, 1)]
    for i, test in enumerate(tests):
        tell("bench", i, len(tests))
        row = bench.run(test, repetitions, True, False)[0].row()
        found.append(Speed(test.name, row["median_ts"], row["stddev_ts"]))
    tell("bench", len(tests), len(tests))
    return found


_what, _out = group("What to run"), group("Output")
WHAT = (
    _what("--base", metavar="FILE", help="The file that this one was made from: adds KL divergence and what each tensor does."),
    _what("n_ctx", "-c", "--ctx-size", type=IntRange(min=16), default=512, show_default=True, metavar="N",
          help="Tokens of a piece."),
    _what("n_chunks", "--chunks", type=IntRange(min=1), default=4, show_default=True, metavar="N",
          help="Pieces of text to predict."),
    _what("n_swap", "--swap", type=IntRange(min=-1), default=16, show_default=True, metavar="N",
          help="Tensors whose effect on the next token is measured; -1: all."),
    _what("-r", "--repetitions", type=IntRange(min=1), default=3, show_default=True, metavar="N", help="Runs of each speed test."),
)
OUTPUT = (
    _out("-o", "--output", type=click.Path(dir_okay=False), metavar="FILE", help="The page.  [default: FILE's name with .html]"),
    _out("as_json", "--json", is_flag=True, help="Everything as JSON on standard output, and no page unless -o is given."),
    _out("-q", "--quiet", is_flag=True, help="No progress on standard error."),
)


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("file", metavar="FILE")
@options(WHAT, OUTPUT)
@click.version_option(ggraph.__version__)
def main(**p: Any) -> None:
    """Check, measure and compare the model FILE, and write one page about it."""
    env.set_quiet(p["quiet"])
    with Bars(p["quiet"]) as bars:
        path, base = (name and hub.resolve(name, lambda done, total: bars("fetch", done, total)) for name in (p["file"], p["base"]))
        output = p["output"] or (None if p["as_json"] else Path(path).name.removesuffix(".gguf") + ".html")
        check_target(output)
        found = report(path, base, n_ctx=p["n_ctx"], n_chunks=p["n_chunks"], n_swap=p["n_swap"], repetitions=p["repetitions"],
                       progress=bars)
    if output:
        from ._report_page import page
        write_text(Path(output), page(found))
    click.echo(json.dumps(found.json(), ensure_ascii=False) if p["as_json"] else output)


if __name__ == "__main__":
    sys.exit(main())
