"""Where the time of a step goes: by op, against ceilings measured in the same process.

In: a setting and sizes. Out: a table as text. The ceilings are the backend's own: what it reads and multiplies per second
when it does nothing else.
"""
from __future__ import annotations

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
        times, wall, outside = _timed(runner, n_prompt or 1, n_depth)
        ceilings = runner.model.backends[-1].ceilings(p.n_threads)
    finally:
        runner.close()
    return table(times, wall, outside, n_prompt or 1, ceilings)


def _timed(runner: Ours, n_tokens: int, n_depth: int, repeats: int = 9) -> tuple[list[tuple[Any, Any, float]], float, float]:
    """(nodes that end, nodes at work, median seconds) of every step; the median wall time of runs that were not timed; and of those
    that were, the median of what is not the plan's."""
    samples: list[Any] = []
    walls: list[float] = []
    rest: list[float] = []
    for timed in [False, True] * repeats:
        if n_tokens > 1 or not walls:
            runner.clear()
            if n_depth:
                runner.evaluate(n_depth)
        seen: list[ggraph.Observed] = []
        runner.ctx.on_step = seen.append if timed else None
        start = time.perf_counter()
        runner.evaluate(n_tokens)
        wall = time.perf_counter() - start
        if timed:
            samples.append([s for run in seen for s in run.steps()])
            rest.append(wall - sum(run.seconds for run in seen))
        else:
            walls.append(wall)
    median = np.median([[seconds for _, _, seconds in s] for s in samples], axis=0)
    steps = [(ended, every, float(m)) for (ended, every, _), m in zip(samples[0], median)]
    return steps, float(np.median(walls)), float(np.median(rest))


def table(times: Sequence[tuple[Any, Any, float]], wall: float, outside: float, n_tokens: int, ceilings: Any) -> str:
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
    lines = [f"{'op':52s} {'steps':>6s} {'ms':>9s} {'share':>6s} {'GB/s':>7s} {'':4s} {'GMAC/s':>8s}"]
    for name, (n, s, nbytes, macs) in sorted(rows.items(), key=lambda kv: -kv[1][1]):
        lines.append(f"{name:52s} {int(n):6d} {1e3 * s:9.3f} {100 * s / native:5.1f}% "
                     f"{_rate(nbytes / s, ceilings and ceilings.bandwidth):12s} {_rate(macs / s, ceilings and ceilings.products)}")
    lines.append(f"native {1e3 * native:.3f} ms, whole step {1e3 * wall:.3f} ms, outside the native call about "
                 f"{1e3 * outside:.3f} ms")
    if ceilings:
        lines.append(f"at most, as measured here: read bandwidth {ceilings.bandwidth / 1e9:.1f} GB/s, products of int8 "
                     f"{ceilings.products / 1e9:.0f} GMAC/s")
        if any(nbytes > s * ceilings.bandwidth for _, s, nbytes, _ in rows.values()):
            lines.append("above 100%: the runs before left a part of these weights in the processor's caches")
    return "\n".join(lines)


def _rate(per_second: float, ceiling: float | None) -> str:
    """In units of 1e9, with the part of the ceiling that it is."""
    if not per_second:
        return ""
    return f"{per_second / 1e9:7.1f}" + (f" {100 * per_second / ceiling:3.0f}%" if ceiling else "")


def _names(names: Iterable[str]) -> str:
    """mul_mat, mul_mat, add as "2 mul_mat+add"."""
    counted = [(name, len(list(same))) for name, same in groupby(names)]
    return "+".join(f"{n} {name}" if n > 1 else name for name, n in counted)
