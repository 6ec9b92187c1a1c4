"""A tiny model, opened once, and an LLM over it."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ggraph.generate import LLM
from ggraph.model import Model
from tests import tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path: Path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    with Model(tiny.write(path)) as model:
        yield model


@pytest.fixture
def llm(model: Model) -> Iterator[LLM]:
    """Context of 256 tokens, ubatches of 16."""
    with LLM(model, n_ctx=256, n_batch=64, n_ubatch=16) as llm:
        yield llm
