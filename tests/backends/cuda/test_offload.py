"""A model on the emulated device: whole, half or without its cache there; how often it copies; replay equals plain launches."""
from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggraph
from ggraph.backends.cuda import Cuda
from tests import spec

NAMES = ("llama-dense", "qwen35-dense")
TOKENS = [5, 3, 9, 7, 7, 2, 11, 1, 4]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGRAPH_BACKEND", "cuda")
    monkeypatch.setenv("GGRAPH_CUDA_DEVICE", "emulator")


def logits(path: Path, counts: list[Counter[str]] | None = None, n_gpu_layers: int | str = "all", override: Any = None,
           **options: Any) -> np.ndarray:
    """Of a prompt of five, then of single tokens; `counts` gets what each step did on the device."""
    opened = ggraph.Model(path, n_gpu_layers=n_gpu_layers, override_tensor=override)
    with opened, ggraph.Context(opened, n_ctx=256, n_batch=64, n_threads=1, **options) as ctx:
        rows, pos = [], 0
        for n in (5, *(1,) * (len(TOKENS) - 5)):
            batch = ggraph.Batch()
            for i in range(pos, pos + n):
                batch.add(TOKENS[i], i, 0, output=True)
            pos += n
            device = ctx.backends[0]
            if isinstance(device, Cuda):
                device.device.counts.clear()
            ctx.process("decode", batch)
            rows.append(np.array(ctx.logits))
            if counts is not None and isinstance(device, Cuda):
                counts.append(Counter(device.device.counts))
    return np.concatenate(rows)


def model(name: str, folder: Path) -> Path:
    return spec.write(spec.specs()[name], folder / "m.gguf")


def close(x: np.ndarray, y: np.ndarray) -> bool:
    return float(np.square(x - y).sum() / np.square(y).sum()) < 1e-6


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("emulated")
def test_whole_half_or_by_pattern_gives_what_the_cpu_gives(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model(name, tmp_path)
    found = [logits(path), logits(path, n_gpu_layers=2), logits(path, offload_kqv=False), logits(path, flash_attn="off"),
             logits(path, override={"ffn_": "CPU"}), logits(path, n_gpu_layers=0)]
    monkeypatch.setenv("GGRAPH_BACKEND", "ref")
    expected = logits(path)
    assert [close(x, expected) for x in found] == [True] * len(found)


ALL = ("llama-dense", "gemma3-dense", "qwen35-dense", "qwen3moe-moe", "mamba2-dense", "gpt-oss-moe", "deepseek2-moe")


@pytest.mark.parametrize("qtype", [None, pytest.param("Q8_0", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == NAMES[0] else [pytest.mark.slow]) for name in ALL])
@pytest.mark.usefixtures("emulated")
def test_a_decode_step_copies_twice_and_is_replayed(name: str, qtype: str | None, tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    path = spec.write(spec.specs()[name], tmp_path / "m.gguf", qtype)
    counts: list[Counter[str]] = []
    replayed = logits(path, counts)
    for step in counts[1:]:
        assert step["uploads"] == 1 and step["downloads"] == 1
    assert counts[-1]["replays"] == 1 and not counts[-1]["launches"]
    monkeypatch.setenv("GGRAPH_CUDA_GRAPH", "0")
    plain: list[Counter[str]] = []
    assert np.array_equal(logits(path, plain), replayed)
    assert not plain[-1]["replays"] and plain[-1]["launches"]


@pytest.mark.usefixtures("emulated")
def test_a_number_of_layers_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    path = model(NAMES[0], tmp_path)
    with pytest.raises(ggraph.PlacementError, match="must be a number, 'auto' or 'all'"):
        logits(path, n_gpu_layers="most")
    with pytest.raises(ggraph.PlacementError, match="must be 'CPU' or 'CUDA0'"):
        logits(path, override={"ffn_": "TPU"})
