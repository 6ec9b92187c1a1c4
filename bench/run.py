"""Measure the cases of `cases.py`, in turn with llama.cpp in the same run, and keep every sample.

In: a folder of model files. Out: one JSON line per case and runner in results/DATE-MACHINE.jsonl, as `ggraph-bench` gives
them, with the read bandwidth measured before each case and what is to be held.
"""
from __future__ import annotations

import fnmatch
import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import click
from cases import CASES, Case

import ggraph
from ggraph.backends.cpu import probe
from ggraph.tools import bench
from ggraph.tools._runners import Params, cpu_name

RESULTS = Path(__file__).parent / "results"


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--only", default="*", metavar="PATTERN", help="Cases by name, as they are printed.")
@click.option("-t", "--threads", default=os.cpu_count() or 1, help="[default: all cores]")
@click.option("-r", "--repetitions", default=5)
@click.option("--peer/--no-peer", default=True, help="Run llama.cpp too.")
@click.option("--machine", default=cpu_name().replace(" ", "-"), help="For the name of the file.")
def main(folder: Path, only: str, threads: int, repetitions: int, peer: bool, machine: str) -> None:
    """Run all cases whose file is in FOLDER."""
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{date.today()}-{machine}.jsonl").open("a") as out:
        for case in CASES:
            test = _test(case, folder / case.file, threads)
            name = f"{case.file} {test.name}"
            if not fnmatch.fnmatch(name, only):
                continue
            if not (folder / case.file).exists():
                click.echo(f"{name}: no such file in {folder}", err=True)
                continue
            rows = list(_measure(case, test, repetitions, peer))
            out.writelines(json.dumps(row) + "\n" for row in rows)
            out.flush()
            click.echo(f"{name}: {_verdict(case, rows)}")


def _test(case: Case, path: Path, threads: int) -> bench.Test:
    return bench.Test(Params(str(path), 2048, 512, threads, "f16", "f16", True, 0), case.n_prompt, case.n_gen, case.n_depth,
                      case.n_parallel)


def _measure(case: Case, test: bench.Test, repetitions: int, peer: bool) -> Iterator[dict[str, Any]]:
    bandwidth = probe.ceilings(test.params.n_threads).bandwidth
    for result in bench.run(test, repetitions, warmup=True, peer=peer):
        row = {**result.row(), "samples_ns": result.samples_ns, "read_bandwidth": bandwidth, "case": asdict(case)}
        yield row | {"model_filename": case.file}                       # no path of this machine


def _verdict(case: Case, rows: list[dict[str, Any]]) -> str:
    ours = rows[0]
    parts = [f"{ours['median_ts']:.1f} tokens/s"]
    if len(rows) > 1:
        ratio = statistics.median(b / a for a, b in zip(ours["samples_ns"], rows[1]["samples_ns"]))
        parts.append(f"{ratio:.2f}x llama.cpp" + (f" (to hold: {case.ratio})" if case.ratio else ""))
    if case.n_gen and case.n_parallel == 1:
        reached = ours["median_ts"] * ours["model_size"] / ours["read_bandwidth"]
        parts.append(f"{100 * reached:.0f}% of the memory's bandwidth")
        if case.ceiling:
            parts[-1] += f" (to hold: {100 * case.ceiling:.0f}%)"
    return ", ".join(parts)


if __name__ == "__main__":
    try:
        main()
    except ggraph.Error as e:
        raise SystemExit(str(e)) from e
