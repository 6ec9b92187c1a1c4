"""bench/: the cases run, their rows can be read back, and the picture pairs what belongs together."""
from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ggraph.backend import Ceilings
from tests import spec

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return {name: importlib.import_module(name) for name in ("cases", "run", "plot")}


def test_a_case_gives_rows_that_the_picture_understands(scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec.write(spec.specs()["llama-dense-b"], tmp_path / "tiny.gguf")
    cases = [scripts["cases"].Case(file, n_gen=2, n_depth=4, ratio=2.0, ceiling=0.9) for file in ("tiny.gguf", "none.gguf")]
    monkeypatch.setattr(scripts["run"], "CASES", cases)
    monkeypatch.setattr(scripts["run"], "RESULTS", tmp_path / "results")
    monkeypatch.setattr(scripts["run"].probe, "ceilings", lambda n: Ceilings(1e9, 1e11))
    done = CliRunner().invoke(scripts["run"].main, [str(tmp_path), "-r", "2", "-t", "1", "--no-peer", "--machine", "here"])
    assert done.exit_code == 0 and "none.gguf tg2 @ d4: no such file" in done.output, done.output
    assert "% of the memory's bandwidth (to hold: 90%)" in done.output
    file, = (tmp_path / "results").glob("*-here.jsonl")
    row = json.loads(file.read_text())
    assert row["model_filename"] == "tiny.gguf" and len(row["samples_ns"]) == 2 and str(tmp_path) not in file.read_text()
    assert scripts["plot"].pairs(file) == {}
    file.write_text(json.dumps(row) + "\n" + json.dumps({**row, "backends": "llama.cpp"}) + "\n")
    assert list(scripts["plot"].pairs(file)) == ["tiny tg2 @ d4, 1 threads"]
    with file.open("a") as out:
        out.writelines(json.dumps({**row, "n_threads": 2, "backends": runner}) + "\n" for runner in ("ggraph", "llama.cpp"))
    pytest.importorskip("matplotlib")
    scripts["plot"].main(file)
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
