"""What tests of drawn tokens share: two small models, and the emulated device as the backend."""
from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {"dense": tiny.write(folder / "dense.gguf"), "hybrid": tiny.write_hybrid(folder / "hybrid.gguf")}


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGRAPH_BACKEND", "cuda")
    monkeypatch.setenv("GGRAPH_CUDA_DEVICE", "emulator")
