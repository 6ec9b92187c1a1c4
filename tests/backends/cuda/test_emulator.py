"""What the emulator runs in another way than a GPU: told by name."""
from __future__ import annotations

import re
import subprocess
import sys

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


SUM = """
import numpy as np
from ggraph.backends.cuda.device import Kernel
from ggraph.backends.cuda.emulator import Emulator
device = Emulator()
x, y = device.alloc(80), device.alloc(4)
device.upload(x, np.ones(20, np.float32))
words = np.array([y, 1, 1, 1, 1, 4, 4, 4, 4, x + {off}, 16, 1, 1, 1, 4, 64, 64, 64, 0], np.int64)
args = np.array([words.ctypes.data + 8 * i for i in (0, 9, 18)], np.uint64)
device.launch(Kernel("rows", "sum_rows"), (1, 1, 1), (32, 1, 1), 0, args)
print(device.download(y, 4).view(np.float32)[0])
"""


def test_a_misaligned_access_ends_the_process_as_it_would_on_a_gpu() -> None:
    aligned, misaligned = (subprocess.run([sys.executable, "-c", SUM.format(off=off)], capture_output=True, text=True)
                           for off in (4, 2))
    assert aligned.stdout == "16.0\n" and misaligned.returncode < 0 and not misaligned.stdout
