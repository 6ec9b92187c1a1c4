"""Where weights and caches go, from the command line to a device: the emulator stands in for it."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import ggraph
from ggraph.tools import bench, imatrix, perplexity, run, tracing
from tests import spec

CASES: list[tuple[tuple[str, ...], str]] = [
    (("-ngl", "all", "-dev", "CUDA0"), "3 of 3 layers on cuda"),
    (("-ngl", "1"), "1 of 3 layers on cuda"),
    (("-ngl", "auto", "-dev", "CUDA0", "-nkvo"), "3 of 3 layers on cuda"),
    (("-ngl", "0"), ""),
    (("-ngl", "9", "-dev", "none"), ""),
    (("-ngl", "0", "-ot", "ffn_=CUDA0,attn=CPU"), "0 of 3 layers on cuda"),
]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GGRAPH_CUDA_DEVICE", "emulator")
    monkeypatch.delenv("GGRAPH_BACKEND", raising=False)
    return spec.write(spec.specs()["llama-dense"], tmp_path / "m.gguf")


def trace(model: Path, *args: str) -> Any:
    return CliRunner().invoke(tracing.main, ["-m", str(model), "-c", "256", "-n", "1", "--token-ids", "5,3,9", "-ub", "8", *args])


@pytest.mark.parametrize(("args", "told"), CASES)
def test_layers_devices_and_patterns(model: Path, args: tuple[str, ...], told: str) -> None:
    done = trace(model, *args)
    assert done.exit_code == 0, done.output
    assert told in done.stderr and ("on cuda" in done.stderr) == bool(told)


@pytest.mark.parametrize(("args", "message"), [
    (("-ngl", "most"), "'most' is not a number, all or auto"), (("-ot", "ffn_"), "'ffn_' is not PATTERN=BUFFER"),
    (("-ot", "ffn_=TPU", "-ngl", "1"), "it must be 'CPU' or 'CUDA0'"), (("-dev", "TPU"), "device is 'TPU'")])
def test_what_makes_no_sense_is_refused(model: Path, args: tuple[str, ...], message: str) -> None:
    done = trace(model, *args)
    assert done.exit_code in (1, 2) and message in done.output


@pytest.mark.parametrize("tool", [run.main, perplexity.main, tracing.main, bench.main])
def test_every_tool_has_the_flags(tool: Any) -> None:
    flags = {flag for param in tool.params for flag in (*param.opts, *param.secondary_opts)}
    assert {"-ngl", "-nkvo"} <= flags
    assert tool is bench.main or {"-ot", "-dev", "--n-gpu-layers", "--override-tensor", "--no-kv-offload"} <= flags


def test_importance_is_measured_with_a_device(model: Path, tmp_path: Path) -> None:
    with ggraph.Model(model, device="CUDA0") as there, ggraph.Model(model) as here:
        want, got = (imatrix.collect(m, [5, 3, 9, 4, 11, 7, 2, 1] * 2, 8).entries for m in (here, there))
    assert want.keys() == got.keys()
    for name, entry in want.items():
        np.testing.assert_allclose(got[name].sums, entry.sums, rtol=2e-2, atol=1e-3 * float(entry.sums.max()))
    assert {"-ngl", "-ot", "-dev"} <= {flag for param in imatrix.main.params for flag in param.opts}


def test_bench_sweeps_them(model: Path) -> None:
    done = CliRunner().invoke(bench.main, ["-m", str(model), "-p", "4", "-n", "0", "-r", "1", "-ub", "8", "-b", "8", "-ngl", "0,2",
                                           "-nkvo", "0,1", "-o", "json", "--no-warmup"])
    rows = json.loads(done.stdout)
    assert [(row["n_gpu_layers"], row["no_kv_offload"]) for row in rows] == [(0, False), (0, True), (2, False), (2, True)]


def test_the_device_is_given_back(model: Path) -> None:
    with ggraph.Model(model, device="CUDA0") as opened:
        with ggraph.Context(opened, n_ctx=256, n_batch=8):
            device: Any = opened.backends[0]
            assert device.device.allocated
        assert device.device.allocated
    assert device.device.allocated == 0
