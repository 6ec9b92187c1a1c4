"""One picture of a file of results: the ratio to llama.cpp of every case, beside what is to be held.

In: a .jsonl file that `run.py` wrote (the last run of a case counts). Out: a .png of the same name. Needs matplotlib (extra
`report`).
"""
from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def pairs(path: Path) -> dict[str, tuple[Row, Row]]:
    """Per case the rows of ggraph and of llama.cpp."""
    found: dict[str, dict[str, Row]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        found.setdefault(name(row), {})[row["backends"]] = row
    return {case: (rows["ggraph"], rows["llama.cpp"]) for case, rows in found.items() if len(rows) == 2}


def name(row: Row) -> str:
    what = f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}"
    together = f" x{row['n_parallel']}" if row["n_parallel"] > 1 else ""
    depth = f" @ d{row['n_depth']}" if row["n_depth"] else ""
    return f"{row['model_filename'].removesuffix('.gguf')} {what}{together}{depth}, {row['n_threads']} threads"


def main(path: Path) -> None:
    from matplotlib.figure import Figure
    cases = pairs(path)
    ratios = [statistics.median(b / a for a, b in zip(ours["samples_ns"], peer["samples_ns"])) for ours, peer in cases.values()]
    figure = Figure(figsize=(9, 1 + 0.28 * len(cases)), layout="constrained")
    axes = figure.subplots()
    axes.barh(list(cases), ratios, color=["tab:blue" if ours["n_prompt"] else "tab:green" for ours, _ in cases.values()])
    for i, ((ours, _), ratio) in enumerate(zip(cases.values(), ratios)):
        axes.text(ratio, i, f" {ratio:.1f}x, {ours['median_ts']:.0f} t/s", va="center", fontsize=8)
        if ours["case"]["ratio"]:
            axes.plot([ours["case"]["ratio"]] * 2, [i - 0.4, i + 0.4], color="tab:red")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("tokens/s over llama.cpp's (blue: prompt, green: generation, red: to hold)")
    axes.set_title(f"{path.stem}: {next(iter(cases.values()))[0]['cpu_info']}" if cases else path.stem)
    axes.margins(x=0.2)
    figure.savefig(path.with_suffix(".png"), dpi=120)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
