"""One picture of a file of results: the ratio to llama.cpp of every case, beside what is to be held; speed by depth, by threads.

In: a .jsonl file that `run.py` wrote (the last run of a case counts). Out: a .png of the same name. Needs matplotlib (extra
`report`).
"""
from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from cases import CASES

Row = dict[str, Any]
Pairs = dict[str, tuple[Row, Row]]                  # per case the rows of ggraph and of llama.cpp


def pairs(path: Path) -> Pairs:
    """The last run of each case that is still one, those of a file together."""
    found: dict[str, dict[str, Row]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        found.setdefault(name(row), {})[row["backends"]] = row
    both = {case: (rows["ggraph"], rows["llama.cpp"]) for case, rows in found.items() if len(rows) == 2}
    kept = {case: place for case, (ours, _) in both.items() if (place := _place(ours)) is not None}
    return {case: both[case] for case in sorted(kept, key=lambda case: kept[case])}


def _place(row: Row) -> tuple[int, int, int] | None:
    """Of a file, then the number of threads, then of a case among `CASES`."""
    files = list(dict.fromkeys(case.file for case in CASES))
    what = tuple(row[field] for field in ("model_filename", "n_prompt", "n_gen", "n_depth", "n_parallel"))
    at = [i for i, c in enumerate(CASES) if (c.file, c.n_prompt, c.n_gen, c.n_depth, c.n_parallel) == what]
    return (files.index(row["model_filename"]), -row["n_threads"], at[0]) if at else None


def name(row: Row) -> str:
    what = f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}"
    together = f" x{row['n_parallel']}" if row["n_parallel"] > 1 else ""
    depth = f" @ d{row['n_depth']}" if row["n_depth"] else ""
    return f"{row['model_filename'].removesuffix('.gguf')} {what}{together}{depth}, {row['n_threads']} threads"


def main(path: Path) -> None:
    from matplotlib.figure import Figure
    found = pairs(path)
    figure = Figure(figsize=(15, 2 + max(0.24 * len(found), 7)), layout="constrained")
    figure.suptitle(f"{path.stem}: {next(iter(found.values()))[0]['cpu_info']}" if found else path.stem)
    left, right = figure.subfigures(1, 2, width_ratios=(3, 2))
    ratios(left.subplots(), found)
    above, below = right.subplots(2)
    lines(above, found, "n_depth", "n_threads", "depth: tokens in the cache")
    lines(below, found, "n_threads", "n_depth", "threads")
    figure.savefig(path.with_suffix(".png"), dpi=110)


def ratios(axes: Any, found: Pairs) -> None:
    """A bar for each case."""
    values = [statistics.median(b / a for a, b in zip(ours["samples_ns"], peer["samples_ns"])) for ours, peer in found.values()]
    axes.barh(list(found), values, color=["tab:blue" if ours["n_prompt"] else "tab:green" for ours, _ in found.values()])
    usual = statistics.mode(ours["n_threads"] for ours, _ in found.values()) if found else 0
    for i, ((ours, _), ratio) in enumerate(zip(found.values(), values)):
        wanted = ours["case"]["ratio"] if ours["n_threads"] == usual else None
        text = f" {ratio:.2f}x, {ours['median_ts']:.0f} tokens/s"
        axes.text(max(ratio, wanted or 0), i, text, va="center", fontsize=8)
        if wanted:
            axes.plot([wanted] * 2, [i - 0.4, i + 0.4], color="tab:red")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("tokens/s over llama.cpp's (blue: prompt, green: generation, red: to hold)")
    axes.set_title("Ratio to llama.cpp, median of pairs in turn")
    axes.margins(x=0.25, y=0.01)


def lines(axes: Any, found: Pairs, by: str, fixed: str, what: str) -> None:
    """tokens/s of each file and test over `by`, for those measured at two values or more; `fixed` as where most were measured."""
    series: dict[tuple[str, int], dict[int, tuple[Row, Row]]] = {}
    usual = statistics.mode(ours[fixed] for ours, _ in found.values()) if found else 0
    for ours, peer in found.values():
        if ours[fixed] == usual and ours["n_parallel"] == 1:
            series.setdefault((ours["model_filename"], ours["n_prompt"]), {})[ours[by]] = ours, peer
    several = {key: points for key, points in sorted(series.items()) if len(points) > 1}
    for i, ((file, n_prompt), points) in enumerate(several.items()):
        for runner, style in enumerate(("o-", "s--")):
            label = f"{file.removesuffix('.gguf')}, {'prompt' if n_prompt else 'generation'}{', llama.cpp' * runner}"
            speeds = [points[x][runner]["median_ts"] for x in sorted(points)]
            axes.plot(sorted(points), speeds, style, color=f"C{i % 10}", label=label)
    axes.set_xlabel(what)
    axes.set_ylabel("tokens/s")
    axes.set_yscale("log")
    axes.set_title(f"Speed by {what.partition(':')[0]}")
    axes.grid(alpha=0.3)
    axes.set_visible(bool(several))
    if several:
        axes.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.15))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
