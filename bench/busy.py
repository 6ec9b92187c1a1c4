"""How much of its speed decoding keeps while other processes want every core: idle and busy in turn, the same text each time.

    python bench/busy.py MODEL [--peer]

In: a model. Out: a line per runner with the median ratio of the pairs, and one JSON line each in
results/DATE-MACHINE-busy.jsonl with every sample. A busy process is a loop that never waits, one for each core. Run it on a
machine that is otherwise idle.
"""
from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import click

from ggraph import hub
from ggraph.tools._runners import Ours, Params, Peer, Runner, cpu_name

RESULTS = Path(__file__).parent / "results"
TO_HOLD = 0.35


@click.command(help=__doc__)
@click.argument("model")
@click.option("-n", "--tokens", default=128, show_default=True)
@click.option("-r", "--pairs", default=7, show_default=True)
@click.option("-t", "--threads", default=os.cpu_count() or 1, help="[default: all cores]")
@click.option("--processes", default=os.cpu_count() or 1, help="Busy ones. [default: one for each core]")
@click.option("--peer", is_flag=True, help="Measure llama.cpp too.")
@click.option("--machine", default=cpu_name().replace(" ", "-"), help="For the name of the file.")
def main(model: str, tokens: int, pairs: int, threads: int, processes: int, peer: bool, machine: str) -> None:
    params = Params(str(hub.resolve(model)), 2048, 512, threads, "f16", "f16", True, 0)
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{date.today()}-{machine}-busy.jsonl").open("a") as out:
        for kind in (Ours, Peer) if peer else (Ours,):
            row = {"runner": kind.name, "model": Path(params.model).name, "tokens": tokens, "threads": threads,
                   "processes": processes, "to_hold": TO_HOLD, **measure(kind(params, tokens + 16), tokens, pairs, processes)}
            out.write(json.dumps(row) + "\n")
            click.echo(f"{kind.name}: {row['idle_ts']:.1f} tokens/s, {row['busy_ts']:.1f} busy: {100 * row['ratio']:.0f}% kept "
                       f"({100 * min(row['ratios']):.0f} to {100 * max(row['ratios']):.0f}%, to hold: {100 * TO_HOLD:.0f}%)")


def measure(runner: Runner, tokens: int, pairs: int, processes: int) -> dict[str, Any]:
    """Tokens per second of all runs, idle and busy in turn, and the ratio of each pair."""
    idle, busy = [], []
    try:
        speed(runner, tokens)                   # warm up
        for _ in range(pairs):
            idle.append(speed(runner, tokens))
            with company(processes):
                busy.append(speed(runner, tokens))
    finally:
        runner.close()
    ratios = [b / a for a, b in zip(idle, busy)]
    return {"ratio": statistics.median(ratios), "idle_ts": statistics.median(idle), "busy_ts": statistics.median(busy),
            "ratios": ratios, "idle": idle, "busy": busy}


def speed(runner: Runner, tokens: int) -> float:
    runner.clear()
    start = time.perf_counter()
    for _ in range(tokens):
        runner.evaluate(1)
    return tokens / (time.perf_counter() - start)


@contextmanager
def company(n: int) -> Iterator[None]:
    """Meanwhile n processes never wait."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        time.sleep(0.3)                         # until they have started
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


if __name__ == "__main__":
    main()
