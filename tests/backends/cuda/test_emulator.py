"""What the emulator runs in another way than a GPU: told by name."""
from __future__ import annotations

import re

import pytest

from ggraph.backends.cuda import source
from ggraph.backends.cuda.emulator import TWINS, twins

OWN = {"common.cuh", "emulator.cuh", "quants.cuh"}         # names that CUDA has, and conversions of 16-bit floats


def test_kernels_that_run_by_twins_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print("\n  not run by the emulator as a GPU runs them: " + ", ".join(twins()))
    assert "matmul.matmul_128" in twins() and not any(name.startswith("matvec.") for name in twins())


def test_no_other_file_tells_the_emulator_from_a_gpu() -> None:
    texts = {path.name: path.read_text() for path in source.FOLDER.iterdir()}
    different = {name for name, text in texts.items() if re.search(r"GGRAPH_EMULATOR|\basm\b", text)}
    assert different - OWN <= TWINS | {"matmul.cu"}         # which has dp4a for old GPUs
