"""bench/: the cases run, their rows can be read back, and the picture pairs what belongs together."""
from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import ggraph
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
    for user in ("run", "plot"):
        monkeypatch.setattr(scripts[user], "CASES", cases)
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
        for other in ({"n_threads": 2}, {"n_gen": 3}):          # the latter is no case any more
            out.writelines(json.dumps({**row, **other, "backends": runner}) + "\n" for runner in ("ggraph", "llama.cpp"))
    assert list(scripts["plot"].pairs(file)) == ["tiny tg2 @ d4, 2 threads", "tiny tg2 @ d4, 1 threads"]
    pytest.importorskip("matplotlib")
    scripts["plot"].main(file)
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_decoding_among_busy_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    busy = importlib.import_module("busy")
    monkeypatch.setattr(busy, "RESULTS", tmp_path)
    path = spec.write(spec.specs()["llama-dense-b"], tmp_path / "tiny.gguf")
    done = CliRunner().invoke(busy.main, [str(path), "-n", "2", "-r", "2", "-t", "1", "--processes", "1", "--machine", "here"])
    assert done.exit_code == 0 and "kept" in done.output, done.output
    row = json.loads(next(tmp_path.glob("*-here-busy.jsonl")).read_text())
    assert row["model"] == "tiny.gguf" and len(row["idle"]) == len(row["busy"]) == len(row["ratios"]) == 2
    assert row["ratio"] == pytest.approx(sum(row["ratios"]) / 2) and str(tmp_path) not in json.dumps(row)


@pytest.mark.parametrize("wrong", [False, True])
def test_the_gpu_check_runs_on_the_emulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                            wrong: bool) -> None:
    """Each stage with one case; where a kernel is wrong, it says so and goes on."""
    monkeypatch.syspath_prepend(str(BENCH))
    for name in ("GGRAPH_BACKEND", "GGRAPH_CUDA_DEVICE"):
        monkeypatch.setenv(name, "")
    gpu_check, stages = (importlib.import_module(name) for name in ("gpu_check", "gpu_stages"))
    monkeypatch.setattr(stages, "TINY", stages.TINY[:1])
    if wrong:
        monkeypatch.setattr(stages, "check", lambda *args: 1 / 0)
    only = "^scale$|unary|llama-dense/single$|llama-tiny" if not wrong else "^scale$"
    code = gpu_check.main(["--emulator", "--minutes", "5", "--only", only, "--output", str(tmp_path / "check.json")])
    told, report = capsys.readouterr().out, json.loads((tmp_path / "check.json").read_text())
    assert code == wrong and ("wrong: ops" if wrong else "all is well") in told
    assert list(report["stages"]) == list(gpu_check.SHARES) and report["device"] == "CUDA emulator"
    if wrong:
        assert report["stages"]["ops"]["wrong"] == ["scale: division by zero"]
        return
    assert report["stages"]["ops"]["n"] and report["stages"]["goldens"]["nmse"]["llama-dense/single"] < 1e-5
    rows = report["stages"]["speed"]["results"]
    assert [(row["what"], row.get("n_seq")) for row in rows] == [("decode", 1), ("decode", 8), ("prefill", None)]
    assert rows[0]["counts_per_step"] == {"uploads": 1, "downloads": 1, "replays": 1} and rows[0]["share_of_copy"] > 0


def test_what_there_is_no_time_for_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    gpu_check, stages = (importlib.import_module(name) for name in ("gpu_check", "gpu_stages"))
    clock = gpu_check.Clock(0)
    clock.begin("ops")
    check = stages.Check(clock, True, "", Path())
    assert list(check._within(["a", "b"])) == [] and check.left_out == 2
    assert "no time for 2 of 2" in capsys.readouterr().out
    clock = gpu_check.Clock(100)
    clock.begin("doctor")
    assert 2 < clock.stage_end - clock.end + 100 < 4 and not clock.up()


@pytest.mark.parametrize("shape", ["llama-tiny", "qwen35-tiny"])
def test_synthetic_models_run(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    path = importlib.import_module("synthetic").write(shape, "Q4_K", tmp_path / "m.gguf")
    with ggraph.Model(path, backend="ref") as model, ggraph.Context(model, n_ctx=256, n_ubatch=16) as ctx:
        batch = ggraph.Batch()
        for token in (1, 2, 3):
            batch.add(token, None, 0, output=True)
        ctx.process("decode", batch)
        assert np.isfinite(ctx.logits).all() and 0.01 < ctx.logits.std() < 10
