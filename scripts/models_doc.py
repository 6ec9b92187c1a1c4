#!/usr/bin/env python3
"""Write docs/models.md: every architecture, what it was checked against, and the largest error.

    python scripts/models_doc.py            runs all goldens of tests/golden/models (minutes), native
    python scripts/models_doc.py NAME ...   only those of some architectures; the other rows stay
"""
from __future__ import annotations

import importlib
import math
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import ggraph  # noqa: E402
from ggraph.model import known_architectures  # noqa: E402
from tests import blocks, encoders, spec, t5  # noqa: E402
from tests import test_architectures as arch  # noqa: E402
from tests.models import test_blocks as chosen  # noqa: E402
from tests.models import test_encoders as enc  # noqa: E402
from tests.models import test_t5 as two_parts  # noqa: E402

HEAD = """# Architectures

Written by `python scripts/models_doc.py`, which runs every case below again in a few minutes; do not edit. Each row is one
`general.architecture` of a GGUF file. All were compared with llama.cpp's answers for tiny random models (tests/golden/models; how
they were made stands in the goldens' scripts): logits of prompts and joint decodes of one and two sequences, unified and one stream
each, in ubatches of 64 and 7; of encoders the embeddings in every pooling; of those with one case a prompt in ubatches of 16.
`bench/shapes.py` compares all of them in a hundred other shapes. The numbers are the largest normalized mean square error over all
cases on the CPU backend, first with F32 weights (tests: at most 1e-5), then with Q8_0 (3e-3) and Q4_0 (8e-3), where llama.cpp's own
rounding of activations to 8 bits weighs most; the reference backend passes the same tests. What has no number was **not verified**:
it runs, and nothing is claimed.

Besides, real models: SmolLM2 135M (llama), Gemma 3 270M (gemma3), all-MiniLM-L6-v2 (bert), against what llama.cpp answers.

| architecture | what it is | cases | F32 | Q8_0 | Q4_0 |
|---|---|---|---|---|---|
"""
TAIL = """
## Not supported

What llama.cpp knows besides (as of its Python package 0.3.36). Opening such a file is an error that names the architecture and what
is missing.

{unsupported}
Next-token prediction runs with one block behind the layers (bailingmoe3, cohere2moe, deepseek2, glm4moe, hy_v3, mimo2,
nemotron_h_moe, qwen35, qwen35moe, qwen3next); files with several run without.
"""
Case = tuple[str, str, float]           # architecture, weight type, error


def asked(name: str) -> bool:
    return arch.known(name) and (len(sys.argv) == 1 or name in sys.argv[1:])


def golden_cases(folder: Path) -> Iterator[Case]:
    for case in arch.LOGITS.files:
        name, scenario = case.split("/")
        s = spec.specs()[name]
        if not asked(s["arch"]) or case in arch.MIXED:
            continue
        n_seq, unified, n_ubatch, qtype, rows = arch.SCENARIOS[scenario]
        path = spec.write(s, folder / "m.gguf", qtype)
        got = arch.logits(path, n_seq=n_seq, unified=unified, n_ubatch=n_ubatch, n_decode=8 // n_seq)[rows]
        yield s["arch"], qtype or "F32", arch.nmse(got, arch.LOGITS[case])


def shape_cases(folder: Path) -> Iterator[Case]:
    for case in (c for c in spec.shapes() if asked(c["spec"]["arch"])):
        path = spec.write(case["spec"], folder / "m.gguf")
        got = arch.logits(path, n_seq=1, unified=True, n_ubatch=16, n_prefill=30, n_decode=2)[case["rows"]]
        want = arch.SHAPES[case["name"]]
        possible = np.isfinite(want)
        yield case["spec"]["arch"], "F32", arch.nmse(got[possible], want[possible])


def block_cases(folder: Path) -> Iterator[Case]:
    """Where blocks are chosen to attend to."""
    for name, case in blocks.CASES.items():
        if asked(of := blocks.case_spec(case)["arch"]):
            yield of, "F32", arch.nmse(chosen.logits(name, folder), chosen.GOLDEN[f"{name}/chosen"])


def encoder_cases(folder: Path) -> Iterator[Case]:
    for name, pooling in ((n, p) for n, p in encoders.cases() if asked(encoders.SPECS[n]["arch"])):
        path = spec.write(encoders.SPECS[name], folder / "m.gguf")
        got = enc.embed(path, pooling, encoders.batch(), len(encoders.LENGTHS))
        yield encoders.SPECS[name]["arch"], "F32", arch.nmse(got, enc.GOLDEN[f"{name}/{pooling}"])


def two_part_cases(folder: Path) -> Iterator[Case]:
    for name, what in t5.SPECS.items():
        if asked(what["arch"]):
            with ggraph.Model(spec.write(what, folder / f"{name}.gguf")) as model:
                yield what["arch"], "F32", arch.nmse(two_parts.logits(model), two_parts.GOLDEN[name])


def title(name: str) -> str:
    """What the module of an architecture says that it is."""
    package = importlib.import_module("ggraph.models")
    module = package.ALIASES.get(name, name).replace("-", "_")
    doc = (importlib.import_module(f"ggraph.models.{module}").__doc__ or "").partition("\n")[0]
    return doc.partition(": ")[2] if module == name.replace("-", "_") else f"as `{module}`"


def names(checked: set[str]) -> list[str]:
    """Every architecture once, as GGUF files spell it."""
    spelled = {name.replace("_", "-"): name for name in known_architectures()}
    return sorted((spelled | {name.replace("_", "-"): name for name in checked}).values())


def unsupported() -> str:
    """A table of what the package says of architectures that it lacks; those that need the same stand together."""
    by_need: dict[str, list[str]] = defaultdict(list)
    for name, needs in importlib.import_module("ggraph.models").UNSUPPORTED.items():
        by_need[needs].append(name)
    rows = [f"| {', '.join(names)} | {needs} |\n" for needs, names in by_need.items()]
    return "| architecture | what it would need |\n|---|---|\n" + "".join(rows)


def main() -> None:
    errors: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as folder:
        for cases in (golden_cases, shape_cases, block_cases, encoder_cases, two_part_cases):
            for name, qtype, error in cases(Path(folder)):
                errors[name][qtype].append(error)
                print(f"{name} {qtype} {error:.1e}", file=sys.stderr, flush=True)
    assert all(math.isfinite(e) for found in errors.values() for es in found.values() for e in es)
    path = ROOT / "docs/models.md"
    table = path.read_text().partition("\n## ")[0]
    rows = {line.split()[1]: line for line in table.splitlines(keepends=True) if line.startswith("| ")}
    checked = {name for name in rows if name != "architecture"} | set(errors)
    path.write_text(HEAD + "".join(row(name, errors[name]) if asked(name) or name not in rows else rows[name]
                                   for name in names(checked)) + TAIL.format(unsupported=unsupported()))


def row(name: str, found: dict[str, list[float]]) -> str:
    worst = [f"{max(found[q]):.0e}" if q in found else "" for q in ("F32", "Q8_0", "Q4_0")]
    return f"| {name} | {title(name)} | {sum(map(len, found.values())) or '**not verified**'} | {' | '.join(worst)} |\n"


if __name__ == "__main__":
    main()
