"""Where the time of a step goes: by op, against ceilings measured in the same process.

In: a setting and sizes. Out: a table as text. Read bandwidth is measured by summing a large array in every thread; what a
product may reach at most is the best that any product of the run reached.
"""
from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

import ggraph

from ._runners import Ours, Params

PRODUCTS = ("mul_mat", "mul_mat_id")


def profile(p: Params, n_prompt: int, n_gen: int, n_depth: int) -> str:
    runner = Ours(p, n_prompt + n_gen + n_depth + 64)
    try:
        times, wall = _timed(runner, n_prompt or 1, n_depth)
    finally:
        runner.close()
    return table(times, wall, n_prompt or 1, read_bandwidth(p.n_threads))


def _timed(runner: Ours, n_tokens: int, n_depth: int, repeats: int = 9) -> tuple[list[tuple[Any, Any, float]], float]:
    """(nodes that end, nodes at work, median seconds) of every step, and the median wall time of runs that were not timed."""
    samples: list[Any] = []
    walls: list[float] = []
    for timed in [False, True] * repeats:
        if n_tokens > 1 or not walls:
            runner.clear()
            if n_depth:
                runner.evaluate(n_depth)
        seen: list[ggraph.Observed] = []
        runner.ctx.on_step = seen.append if timed else None
        start = time.perf_counter()
        runner.evaluate(n_tokens)
        if timed:
            samples.append([s for run in seen for s in run.steps()])
        else:
            walls.append(time.perf_counter() - start)
    median = np.median([[seconds for _, _, seconds in s] for s in samples], axis=0)
    return [(ended, every, float(m)) for (ended, every, _), m in zip(samples[0], median)], float(np.median(walls))


def table(times: Sequence[tuple[Any, Any, float]], wall: float, n_tokens: int, bandwidth: float) -> str:
    rows: dict[str, list[float]] = {}
    for nodes, every, seconds in times:                         # what comes before a node's last step is preparation
        products = [n for n in nodes if n.op in PRODUCTS]
        ops = _names(n.op for n in nodes) or "before " + every[-1].op
        kind = " " + ",".join(dict.fromkeys(n.src[0].type.name for n in products)) if products else ""
        row = rows.setdefault(ops + kind, [0, 0.0, 0.0, 0.0])
        row[0] += 1
        row[1] += seconds
        for product in products:
            if product.src[0].op == "none":
                weight = product.src[0]
                row[2] += weight.nbytes
                row[3] += weight.numel * (1 if "result_output" in nodes[-1].name else n_tokens)
    native = sum(s for _, _, s in times)
    lines = [f"{'op':52s} {'steps':>6s} {'ms':>9s} {'share':>6s} {'GB/s':>7s} {'GMAC/s':>8s}"]
    for name, (n, s, nbytes, macs) in sorted(rows.items(), key=lambda kv: -kv[1][1]):
        lines.append(f"{name:52s} {int(n):6d} {1e3 * s:9.3f} {100 * s / native:5.1f}% "
                     f"{nbytes / s / 1e9 if nbytes else 0:7.1f} {macs / s / 1e9 if macs else 0:8.1f}")
    lines.append(f"native {1e3 * native:.3f} ms, whole step {1e3 * wall:.3f} ms, outside the native call about "
                 f"{max(0.0, 1e3 * (wall - native)):.3f} ms; read bandwidth here {bandwidth / 1e9:.1f} GB/s")
    return "\n".join(lines)


def _names(names: Iterable[str]) -> str:
    """mul_mat, mul_mat, add as "2 mul_mat+add"."""
    counted = [(name, len(list(same))) for name, same in groupby(names)]
    return "+".join(f"{n} {name}" if n > 1 else name for name, n in counted)


def read_bandwidth(n_threads: int, nbytes: int = 256 << 20) -> float:
    """Bytes per second that `n_threads` threads read together, the best of five passes."""
    arrays = [np.ones(nbytes // 8 // n_threads) for _ in range(n_threads)]
    best = 0.0
    for _ in range(5):
        threads = [threading.Thread(target=a.sum) for a in arrays]
        start = time.perf_counter()
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        best = max(best, sum(a.nbytes for a in arrays) / (time.perf_counter() - start))
    return best
