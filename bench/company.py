"""A sequence alone and beside another one: llama.cpp and ggraph each against itself.

    python bench/company.py [--only REGEX]

Needs llama-cpp-python. For every golden spec and every architecture of `NEW` two sequences of 33 and 4 tokens run in one batch,
then decode three tokens jointly; then each runs alone. A line per sequence whose logits differ on either side by more than rounding
(NMSE 1e-6), and how far the two sides are apart alone. Exit code 1 if a sequence of ours depends on the other.
"""
from __future__ import annotations

import os
import re
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from mutations import COMPARED, NEW, Scene  # noqa: E402
from shapes import mutated  # noqa: E402
from sides import Steps, nmse, ours, steps, theirs  # noqa: E402

from tests import spec  # noqa: E402

PAIR = Scene((33, 4))


@click.command(help=__doc__)
@click.option("--only", default="", help="Specs whose name matches.")
def main(only: str) -> None:
    os.environ["GGML_NO_BACKTRACE"] = "1"
    dependent = False
    for name in (n for n in sorted([*spec.specs(), *NEW]) if re.search(only, n)):
        reader, writer = get_context("fork").Pipe(duplex=False)
        process = get_context("fork").Process(target=work, args=(writer, name))
        process.start()
        writer.close()
        try:
            lines = reader.recv()
        except EOFError:                                # llama.cpp's assertion
            lines = []
        process.join()
        for line in lines:
            dependent |= line["ours"] > 1e-6
            print(" ".join(f"{k} {v:.1e}" if isinstance(v, float) else str(v) for k, v in line.items()), flush=True)
    sys.exit(int(dependent))


def work(pipe: Any, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        s = spec.specs().get(name) or mutated(Path(folder), name, "same")
        if s is None or s.get("encode"):
            pipe.send([])
            return
        path = spec.write(s, Path(folder) / "m.gguf")
        pair: Steps = list(steps(PAIR))
        sides = {"llama.cpp": lambda scene, what: theirs(path, scene, False, what=what),
                 "ours": lambda scene, what: ours(path, scene, what=what)}
        joint = {side: run(PAIR, pair) for side, run in sides.items()}
        if joint["llama.cpp"] is None:
            pipe.send([])
            return
        pipe.send([line for seq in range(len(PAIR.lengths)) if (line := row(name, seq, pair, joint, sides))])


def row(name: str, seq: int, pair: Steps, joint: dict[str, Any], sides: dict[str, Any]) -> dict[str, Any] | None:
    own = [[(t, p, 0) for t, p, s in rows if s == seq] for rows in pair]
    mask = np.array([s == seq for rows in pair for _, _, s in rows])
    text = COMPARED.get(name, slice(None))
    alone = {side: run(PAIR, own)[:, text] for side, run in sides.items()}      # in a context of the same size
    errors = {side: nmse(joint[side][mask][:, text], alone[side]) for side in sides}
    if max(errors.values()) <= 1e-6:
        return None
    return {"spec": name, "sequence": seq, **errors, "apart": nmse(alone["ours"], alone["llama.cpp"])}


if __name__ == "__main__":
    main()
