"""The ceilings: the probes do the work that is counted."""
from __future__ import annotations

import numpy as np
import pytest

from ggraph.backends import ref
from ggraph.backends.cpu import probe

from . import native


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_every_line_is_read_once(n_threads: int) -> None:
    n = 37
    data = native.aligned(n * 64 * probe.LINES)
    data.view(np.int32)[:] = np.random.default_rng(1).integers(-1000, 1000, data.nbytes // 4)
    out = native.aligned(64 * n_threads)
    native.call(probe.read, data, n, out, n_threads=n_threads)
    assert (out.view(np.int32).reshape(-1, 16).sum(0) == data.view(np.int32).reshape(-1, 16).sum(0)).all()


def test_twelve_products_are_made_per_step() -> None:
    data, out = native.aligned(128), native.aligned(64)
    data[:64], data[64:] = 3, 2
    native.call(probe.multiply, data, 5, out)
    assert (out.view(np.int32) == 5 * 12 * 4 * 3 * 2).all()


def test_ceilings_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(probe, "STEPS", 1 << 10)
    measured = probe.ceilings(1)
    assert measured.bandwidth > 1e8 and measured.products > 1e8
    assert ref.open().ceilings(1) is None
