"""ggraph-bench: speed of prompt processing and of generation, in llama-bench's form, also beside llama.cpp itself.

In: a command line; every sizes' flag takes several values. Out: a table as Markdown, CSV, JSON, JSON lines or SQL. Each test
starts from an empty context; tokenizing and sampling are not part of it.
"""
from __future__ import annotations

import csv
import io
import itertools
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

import ggraph
from ggraph import env, hub

from ._console import Bars
from ._options import KV_TYPES, Command, group, options
from ._profile import profile
from ._runners import Ours, Params, Peer, Runner, cpu_name

_what, _sweep, _out = group("Tests"), group("Settings (several values, comma separated or repeated, sweep them)"), group("Output")

TESTS = (
    _what("-m", "--model", multiple=True, default=(hub.DEFAULT,), metavar="FILE", help="Model file or name.  [default: smollm2]"),
    _what("-p", "--n-prompt", multiple=True, metavar="N", help="Prompt tokens of a pp test; 0: none.  [default: 512]"),
    _what("-n", "--n-gen", multiple=True, metavar="N", help="Tokens of a tg test; 0: none.  [default: 128]"),
    _what("-pg", multiple=True, metavar="PP,TG", help="A test of a prompt and generation together."),
    _what("-d", "--n-depth", multiple=True, metavar="N", help="Tokens already in the cache.  [default: 0]"),
    _what("-np", "--n-parallel", multiple=True, metavar="N", help="Sequences that run together.  [default: 1]"),
    _what("-r", "--repetitions", type=click.IntRange(1), default=5, metavar="N", help="Runs of each test.  [default: 5]"),
    _what("--warmup/--no-warmup", default=True, help="One run before that does not count.  [default: on]"),
    _what("--peer", is_flag=True, help="Run llama.cpp (package llama-cpp-python) in turn with ggraph and print the ratio."),
    _what("--profile", is_flag=True, help="Afterwards, time by op, against what this machine's memory and arithmetic give."),
)
SWEEP = (
    _sweep("-b", "--batch-size", multiple=True, metavar="N", help="Rows of a batch.  [default: 2048]"),
    _sweep("-ub", "--ubatch-size", multiple=True, metavar="N", help="Rows of a graph run.  [default: 512]"),
    _sweep("-t", "--threads", multiple=True, metavar="N", help="Threads.  [default: all cores]"),
    _sweep("-ctk", "--cache-type-k", multiple=True, metavar="TYPE", help="Type of K in the cache.  [default: f16]"),
    _sweep("-ctv", "--cache-type-v", multiple=True, metavar="TYPE", help="Type of V in the cache.  [default: f16]"),
    _sweep("-fa", "--flash-attn", multiple=True, metavar="0|1", help="Attention as one op.  [default: 1]"),
    _sweep("-ngl", "--n-gpu-layers", multiple=True, metavar="N", help="Layers on a GPU; 99: all.  [default: 0]"),
    _sweep("-nkvo", "--no-kv-offload", multiple=True, metavar="0|1", help="Keep K and V on the host.  [default: 0]"),
)
OUTPUT = (
    _out("-o", "--output", type=click.Choice(["md", "csv", "json", "jsonl", "sql"]), default="md",
         help="Form of the result.  [default: md]"),
    _out("as_json", "--json", is_flag=True, help="The same as -o json."),
    _out("-q", "--quiet", is_flag=True, help="No progress on standard error."),
)


@dataclass(frozen=True)
class Test:
    params: Params
    n_prompt: int
    n_gen: int
    n_depth: int
    n_parallel: int

    @property
    def name(self) -> str:
        """As llama-bench writes it: pp512, tg128, pp512+tg64, each with ` @ d512`."""
        parts = [f"{what}{n}" for what, n in (("pp", self.n_prompt), ("tg", self.n_gen)) if n]
        together = f" x{self.n_parallel}" if self.n_parallel > 1 else ""
        return "+".join(parts) + together + (f" @ d{self.n_depth}" if self.n_depth else "")

    @property
    def n_ctx(self) -> int:
        return (self.n_prompt + self.n_gen + self.n_depth + 8) * self.n_parallel

    @property
    def n_tokens(self) -> int:
        return (self.n_prompt + self.n_gen) * self.n_parallel


@dataclass
class Result:
    """Samples of one test with one runner, in nanoseconds, and what they belong to."""
    test: Test
    runner: str
    model: dict[str, Any]
    samples_ns: list[int] = field(default_factory=list)
    test_time: str = ""

    @property
    def samples_ts(self) -> list[float]:
        return [1e9 * self.test.n_tokens / ns for ns in self.samples_ns]

    def row(self) -> dict[str, Any]:
        """llama-bench's fields."""
        p, ts, ns = self.test.params, self.samples_ts, self.samples_ns
        return {"build_commit": ggraph.__version__, "backends": self.runner, "cpu_info": cpu_name(), "model_filename": p.model,
                **self.model, **{k: v for k, v in asdict(p).items() if k != "model"}, "n_prompt": self.test.n_prompt,
                "n_gen": self.test.n_gen, "n_depth": self.test.n_depth, "n_parallel": self.test.n_parallel,
                "test_time": self.test_time,
                "avg_ns": round(statistics.mean(ns)), "stddev_ns": round(_deviation(ns)), "avg_ts": statistics.mean(ts),
                "stddev_ts": _deviation(ts), "median_ts": statistics.median(ts)}


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@options(TESTS, SWEEP, OUTPUT)
@click.version_option(ggraph.__version__)
def main(**o: Any) -> None:
    """Measure prompt processing (pp) and text generation (tg) in tokens per second.

    Numbers may be lists and ranges: 1,2,4 or 1-4 or 128-512*2.
    """
    env.set_quiet(o["quiet"])
    results: list[Result] = []
    tests = list(plan(o))
    if not tests:
        raise click.UsageError("there is nothing to measure: give -p, -n or -pg above 0")
    with Bars(o["quiet"]) as bars:
        for i, test in enumerate(tests):
            bars("bench", i, len(tests))
            results += run(test, o["repetitions"], o["warmup"], o["peer"])
        bars("bench", len(tests), len(tests))
    click.echo(FORMATS["json" if o["as_json"] else o["output"]](results).rstrip())
    if o["profile"]:
        for test in tests:
            click.echo(f"\n{test.name}, one step of it")
            click.echo(profile(test.params, test.n_prompt, test.n_gen, test.n_depth))


def plan(o: dict[str, Any]) -> Iterator[Test]:
    """All tests of a command line: the product of the settings, then pp, tg and pg tests at every depth."""
    def of(name: str, *limits: int) -> list[int]:
        try:
            return numbers(o[name], *limits)
        except click.BadParameter as e:
            e.param_hint = "--" + name.replace("_", "-")
            raise
    models = [str(hub.resolve(m)) for m in o["model"]]
    settings = itertools.product(
        models, of("batch_size", 2048, 1), of("ubatch_size", 512, 1), of("threads", os.cpu_count() or 1, 1),
        words(o["cache_type_k"], "f16"), words(o["cache_type_v"], "f16"), of("flash_attn", 1), of("n_gpu_layers", 0),
        of("no_kv_offload", 0))
    kinds = [(n, 0) for n in of("n_prompt", 512) if n] + [(0, n) for n in of("n_gen", 128) if n]
    kinds += [(int(a), int(b)) for a, b in (_pair(x) for x in o["pg"])]
    for m, b, ub, t, ctk, ctv, fa, ngl, nkvo in settings:
        params = Params(m, b, ub, t, ctk, ctv, bool(fa), ngl, bool(nkvo))
        for (pp, tg), depth, parallel in itertools.product(kinds, of("n_depth", 0), of("n_parallel", 1)):
            yield Test(params, pp, tg, depth, parallel)


def _pair(text: str) -> tuple[str, str]:
    a, comma, b = text.partition(",")
    if not comma or not a.isdigit() or not b.isdigit():
        raise click.BadParameter(f"{text!r} is not of the form PP,TG", param_hint="-pg")
    return a, b


def words(given: Sequence[str], default: str) -> list[str]:
    """Cache types."""
    found = [w for text in given for w in text.split(",")] or [default]
    if unknown := set(found) - set(KV_TYPES):
        raise click.BadParameter(f"{sorted(unknown)[0]!r} is no cache type; there are {', '.join(KV_TYPES)}")
    return found


def numbers(given: Sequence[str], default: int, least: int = 0) -> list[int]:
    """1,2,4 and 1-4, 1-9+2, 128-512*2."""
    out: list[int] = []
    for word in (w for text in given for w in text.split(",")):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?:([+*])(\d+))?)?", word)
        if not match:
            raise click.BadParameter(f"{word!r} is no number or range")
        first, last, sign, step = match.groups()
        n, end, by = int(first), int(last or first), int(step or 1)
        if by < 1 or end < n or (sign == "*" and (by < 2 or n < 1)):
            raise click.BadParameter(f"{word!r} is no range")
        if n < least:
            raise click.BadParameter(f"{word!r}: must be at least {least}")
        while n <= end:
            out.append(n)
            n = n * by if sign == "*" else n + by
    return out or [default]


def run(test: Test, repetitions: int, warmup: bool, peer: bool) -> list[Result]:
    """The samples of one test; with a peer, in turn."""
    runners: list[Runner] = [Ours(test.params, test.n_ctx, test.n_parallel)]
    try:
        if peer:
            runners.append(Peer(test.params, test.n_ctx, test.n_parallel))
        model = describe(runners[0].model)  # type: ignore[attr-defined]
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        results = [Result(test, r.name, model, test_time=now) for r in runners]
        for i in range(repetitions + warmup):
            for runner, result in zip(runners, results):
                ns = sample(runner, test)
                if i >= warmup:
                    result.samples_ns.append(ns)
    finally:
        for runner in runners:
            runner.close()
    return results


def sample(runner: Runner, test: Test) -> int:
    """Nanoseconds of one run, from an empty context filled to the test's depth."""
    runner.clear()
    if test.n_depth:
        runner.evaluate(test.n_depth, test.n_parallel)
    start = time.perf_counter_ns()
    if test.n_prompt:
        runner.evaluate(test.n_prompt, test.n_parallel)
    for _ in range(test.n_gen):
        runner.evaluate(1, test.n_parallel)
    return time.perf_counter_ns() - start


def describe(model: ggraph.Model) -> dict[str, Any]:
    """Type, size and number of parameters."""
    name = model.kv.get("general.size_label") or model.kv.get("general.name") or Path(model.path).stem
    types: dict[str, int] = {}
    for t in model.file.tensors.values():
        types[t.type.name] = types.get(t.type.name, 0) + t.nbytes
    return {"model_type": f"{model.file.arch} {name} {max(types, key=types.__getitem__)}",
            "model_size": sum(types.values()), "model_n_params": model.n_params}


# --- output

def markdown(results: Sequence[Result]) -> str:
    """llama-bench's table; columns of settings that do not vary are left out. With a peer, the ratio of medians."""
    head = ["model", "size", "params", "backend", "threads", *_varying(results), "test", "t/s"]
    rows = [head, ["---"] * 3 + ["---"] + ["---:"] * (len(head) - 4)]
    peers = {r.test: r for r in results if r.runner == Peer.name}
    if peers:
        rows[0].append("ratio")
        rows[1].append("---:")
    for r in results:
        row = r.row()
        cells = [row["model_type"], f"{row['model_size'] / 2**20:.2f} MiB", f"{row['model_n_params'] / 1e6:.2f} M", r.runner,
                 str(row["n_threads"]), *(str(row[c]) for c in _varying(results)), r.test.name,
                 f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}"]
        if peers:
            cells.append(_ratio(r, peers[r.test]) if r.runner == Ours.name else "")
        rows.append(cells)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows) + f"\n\n{cpu_name()}; ggraph {ggraph.__version__}"


def _varying(results: Sequence[Result]) -> list[str]:
    names = ("n_batch", "n_ubatch", "type_k", "type_v", "flash_attn", "n_gpu_layers", "no_kv_offload")
    return [n for n in names if len({getattr(r.test.params, n) for r in results}) > 1]


def _ratio(ours: Result, peer: Result) -> str:
    """Median over the pairs of runs that followed each other."""
    return f"{statistics.median(b / a for a, b in zip(ours.samples_ns, peer.samples_ns)):.2f}x"


def as_csv(results: Sequence[Result]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(results[0].row()))
    writer.writeheader()
    writer.writerows(r.row() for r in results)
    return out.getvalue()


def _full(r: Result) -> dict[str, Any]:
    return {**r.row(), "samples_ns": r.samples_ns, "samples_ts": r.samples_ts}


def as_sql(results: Sequence[Result]) -> str:
    """A table llama_bench, created if need be, and one INSERT per result."""
    rows = [r.row() for r in results]
    types = {int: "INTEGER", float: "REAL", bool: "INTEGER"}
    columns = ", ".join(f"{k} {types.get(type(v), 'TEXT')}" for k, v in rows[0].items())
    lines = [f"CREATE TABLE IF NOT EXISTS llama_bench ({columns});"]
    for row in rows:
        values = ", ".join(str(int(v) if isinstance(v, bool) else v) if isinstance(v, int | float)
                           else "'" + str(v).replace("'", "''") + "'" for v in row.values())
        lines.append(f"INSERT INTO llama_bench ({', '.join(row)}) VALUES ({values});")
    return "\n".join(lines)


FORMATS: dict[str, Callable[[Sequence[Result]], str]] = {
    "md": markdown, "csv": as_csv, "json": lambda rs: json.dumps([_full(r) for r in rs], indent=2),
    "jsonl": lambda rs: "\n".join(json.dumps(_full(r)) for r in rs), "sql": as_sql}

if __name__ == "__main__":
    sys.exit(main())
