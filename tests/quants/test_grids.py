"""The grids are those of the `gguf` package; `encode` is how their strings in ggraph/quants/grids.py were made."""
from __future__ import annotations

import base64
import zlib
from typing import Any

import gguf.quants
import numpy as np
import pytest

from ggraph.quants import grids, iq


def encode(points: Any, values: tuple[int, ...]) -> str:
    digits = np.searchsorted(np.array(values), points)
    numbers = (digits * len(values) ** np.arange(points.shape[1])).sum(axis=1)
    return base64.b85encode(zlib.compress(np.diff(numbers, prepend=0).astype("<i2").tobytes(), 9)).decode()


@pytest.mark.parametrize("name", ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"])
def test_grids(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quant = getattr(gguf.quants, name)
    quant.init_grid()
    points = quant.grid.reshape(quant.grid_shape)
    assert grids.grid(name).dtype == np.int8 and not grids.grid(name).flags.writeable
    np.testing.assert_array_equal(grids.grid(name), points)
    monkeypatch.setitem(grids._GRIDS, name, (quant.grid_map, points.shape[1], encode(points, quant.grid_map)))
    np.testing.assert_array_equal(grids.grid.__wrapped__(name), points)


def test_even_signs() -> None:
    assert iq.EVEN_SIGNS.tobytes() == gguf.quants.IQ2_XXS.ksigns
