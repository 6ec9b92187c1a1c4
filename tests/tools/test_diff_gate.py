"""ggraph-diff as a gate, on SmolLM2 and by command line: one damaged block in any tensor is named, and the exit code is 1."""
from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ggraph import gguf

N_TENSORS = 20
PROMPT = "The sky is blue because of"       # short: `ref` takes a second for each token
SETTINGS = {"two files": (), "two backends": ("--backend", "ref,cpu"), "flash attention": ("-fa", "on,off")}


def damaged() -> list[tuple[int, float]]:
    """Which of the quantized tensors, and where in it the block is, as a part of the whole."""
    rng = np.random.default_rng(20)
    return list(zip(rng.choice(211, N_TENSORS, replace=False).tolist(), rng.uniform(size=N_TENSORS).tolist()))


@pytest.fixture(scope="module")
def copy(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copy(smollm2, tmp_path_factory.mktemp("gate") / "bad.gguf"))


@pytest.fixture
def bad(copy: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Path, str, int]]:
    """The model with the scale of one block times 4; the tensor's name and the number of the block."""
    which, where = request.param
    with gguf.File(copy) as file:
        tensor = [t for t in file.tensors.values() if t.type.quantized][which]
        block = int(where * (tensor.nbytes // tensor.type.nbytes))
        start = tensor.offset + block * tensor.type.nbytes
    raw = np.memmap(copy, np.uint8, "r+")
    before = raw[start:start + 2].copy()
    raw[start:start + 2].view(np.float16)[0] *= np.float16(4)
    raw.flush()
    yield copy, tensor.name, block
    raw[start:start + 2] = before
    raw.flush()


def call(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ggraph.tools.diff", *map(str, args), "-p", PROMPT, "--swap", "0", "-q"],
                          capture_output=True, text=True, timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("bad", damaged(), indirect=True, ids=[str(which) for which, _ in damaged()])
def test_a_damaged_block_is_named(smollm2: Path, bad: tuple[Path, str, int], settings: tuple[str, ...]) -> None:
    path, name, block = bad
    done = call(smollm2, path, *settings)
    assert done.returncode == 1 and f"block {block} (row" in done.stdout and f"of tensor {name} is off" in done.stdout, done
    if "ref" not in "".join(settings):          # which takes its time
        done = call(smollm2, path, *settings, "--json")
        told = json.loads(done.stdout)
        assert done.returncode == 1 and told["passed"] is False
        assert [(f["what"], f["where"]) for f in told["failures"] if f["what"] == "block"] == [("block", name)]
        assert [t["name"] for t in told["tensors"] if not t["same"]] == [name]


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_sound_copy_passes(smollm2: Path, copy: Path, settings: tuple[str, ...]) -> None:
    done = call(smollm2, copy, *settings)
    assert done.returncode == 0 and "PASS" in done.stdout, done
