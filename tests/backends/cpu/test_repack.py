"""Panels hold the file's values: read back one by one, they are what `quants` unpacks."""
from __future__ import annotations

import numpy as np
import pytest

from ggraph import dtypes, quants
from ggraph.backends.cpu import repack
from ggraph.dtypes import DType
from tests.backends.cpu.native import TYPES, call, panels, product, random_rows


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_each_value_is_where_its_product_looks_for_it(dtype: DType) -> None:
    """Columns of the unit matrix, scaled so that an activation block holds exactly 1 x 127."""
    k = max(dtype.block, 32)
    raw = random_rows(dtype, 16, k, seed=5)
    packed = panels(raw, dtype, k)
    values = product(packed, 127 * np.eye(k, dtype=np.float32), dtype, 16).T / np.float32(127)
    expected = quants.unpack(raw, dtype)
    assert np.allclose(values, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_any_number_of_threads_packs_the_same(dtype: DType) -> None:
    raw = random_rows(dtype, 53, 2 * max(dtype.block, 64))
    k = 2 * max(dtype.block, 64)
    assert np.array_equal(panels(raw, dtype, k, 1), panels(raw, dtype, k, 3))


def test_rows_past_the_last_are_zero() -> None:
    packed = panels(random_rows(dtypes.F32, 5, 8), dtypes.F32, 8).view(np.float32).reshape(8, 16)
    assert not packed[:, 5:].any() and packed[:, :5].all()


def test_rows_may_be_apart() -> None:
    raw = random_rows(dtypes.Q4_1, 32, 64)
    out = np.zeros(repack.panel_bytes(dtypes.Q4_1, 16, 64), np.uint8)
    call(repack.repack_kernel(dtypes.Q4_1), raw, 2 * raw.strides[0], out, 16, 64)
    assert np.array_equal(out, panels(raw[::2].copy(), dtypes.Q4_1, 64))


def test_sizes() -> None:
    assert repack.panel_bytes(dtypes.Q4_K, 17, 512) == 32 * 2 * 144
    assert repack.supports(dtypes.Q4_K, 512) and not repack.supports(dtypes.Q4_K, 128)
    assert repack.supports(dtypes.F16, 7) and not repack.supports(dtypes.I32, 32)
