"""What all tests share: the real models, where they have been fetched."""
from __future__ import annotations

from pathlib import Path

import pytest

from ggraph import env, hub

collect_ignore = [] if env.get("GGRAPH_GOLDENS") else ["test_goldens.py"]


@pytest.fixture(autouse=True)
def _loud() -> None:
    """Whatever a command line of the test before was told with -q."""
    env.set_quiet(False)


def _fetched(name: str) -> Path:
    path = env.cache_dir("models", hub.KNOWN[name].file)
    if not path.is_file():
        pytest.skip(f"{name} is not in the cache folder; scripts/test-full fetches it")
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct Q4_1."""
    return _fetched("smollm2")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma 3 270M Q4_K_M."""
    return _fetched("gemma3-270m")
