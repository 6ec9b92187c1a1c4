"""What the tests of all commands share."""
from __future__ import annotations

from collections.abc import Iterator

import pytest

from ggraph import env


@pytest.fixture(autouse=True)
def loud() -> Iterator[None]:
    """A command run with -q leaves the process quiet."""
    yield
    env.set_quiet(False)
