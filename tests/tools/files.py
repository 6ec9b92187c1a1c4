"""Small files to inspect, check and quantize: the tiny model with rows of whole super-blocks."""
from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from ggraph import gguf
from tests import spec, tiny


def wide(path: Path, qtype: str | None = None, **kv: Any) -> Path:
    """The tiny model with 256 elements a row; matrices of type `qtype`, random bits with sound scales."""
    with mock.patch.multiple(tiny, N_EMBD=256, N_FF=512, N_HEAD=8):
        return spec.write(tiny.tiny(**kv), path, qtype)


def poke(path: Path, name: str, at: int, data: bytes) -> None:
    """Overwrite bytes of a tensor, from its byte `at` on."""
    with gguf.File(path) as file:
        start = file.tensors[name].offset + at
    with path.open("r+b") as out:
        out.seek(start)
        out.write(data)


def half(x: float) -> bytes:
    return bytes(np.float16(x).tobytes())
