"""Packing: bit for bit llama.cpp's reference quantizers.

tests/golden/quants.npz holds 56 blocks `x` (normal, of every magnitude from subnormal to overflow, ties, zeros of both
signs, infinities) and what quantize_row_*_ref of ggml-quants.c makes of them, compiled without fused multiply-add; for
Q8_K 13 blocks `x256` (normal, of many magnitudes, ties, both signs of the largest, zeros).
"""
from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import gguf as package
import gguf.quants
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ggraph import dtypes, quants
from ggraph.dtypes import DType

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "quants.npz")
BLOCKS = [t for t in (*quants.PACKABLE, *quants.ACTIVATIONS) if t.quantized]
IN_PACKAGE = [t for t in quants.PACKABLE if t is not dtypes.IQ4_NL]

Floats = npt.NDArray[np.float32]


def reference(x: Floats, dtype: DType) -> npt.NDArray[np.uint8]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        out: npt.NDArray[Any] = gguf.quants.quantize(x, package.GGMLQuantizationType[dtype.name])
    return out.view(np.uint8)


@pytest.mark.parametrize("dtype", BLOCKS, ids=repr)
def test_equals_llama_cpp(dtype: DType) -> None:
    x, want = GOLDEN["x256" if dtype is dtypes.Q8_K else "x"], GOLDEN[f"pack_{dtype}"]
    got = quants.pack(x, dtype)
    if dtype is dtypes.IQ4_NL:      # the C code leaves the codes of a block it takes for zero uninitialised
        got[np.abs(x).max(axis=1) < 1e-15, 2:] = 0
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", IN_PACKAGE, ids=repr)
@settings(max_examples=100, deadline=None)
@given(x=arrays(np.float32, (3, 64), elements=st.floats(-2.0**99, 2.0**99, width=32)))
def test_equals_the_package(dtype: DType, x: Floats) -> None:
    x += np.float32(0)      # no -0.0: for a block of those the package, unlike C, keeps the sign
    np.testing.assert_array_equal(quants.pack(x, dtype), reference(x, dtype))


@pytest.mark.parametrize("dtype", IN_PACKAGE, ids=repr)
def test_equals_the_package_in_bulk(dtype: DType) -> None:
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((64, 256)) * 10.0 ** rng.uniform(-8, 8, (64, 1))).astype(np.float32)
    np.testing.assert_array_equal(quants.pack(x, dtype), reference(x, dtype))


@pytest.mark.parametrize("dtype", (*quants.PACKABLE, *quants.ACTIVATIONS), ids=repr)
def test_zeros_stay_zero(dtype: DType) -> None:
    assert not quants.unpack(quants.pack(np.zeros((2, 256), np.float32), dtype), dtype).any()


@pytest.mark.parametrize("dtype", (*quants.PACKABLE, *quants.ACTIVATIONS), ids=repr)
@pytest.mark.parametrize("at", [0, 17, 31])
def test_a_nan_spoils_its_block_and_no_other(dtype: DType, at: int) -> None:
    n = max(dtype.block, 32)
    x = np.ones((2, 2 * n), np.float32)
    x[1, n + at] = np.nan
    y = quants.unpack(quants.pack(x, dtype), dtype)
    spoilt = np.isnan(y)
    assert spoilt[1, n:].all() if dtype.quantized else spoilt[1, n + at]
    np.testing.assert_allclose(y[~spoilt], 1, rtol=0.02)
    assert spoilt[0].sum() == 0 and not spoilt[1, :n].any()


@pytest.mark.parametrize("dtype, dot", [
    ("F32", "F32"), ("F16", "F16"), ("BF16", "BF16"), ("Q4_0", "Q8_0"), ("Q4_1", "Q8_1"), ("Q5_0", "Q8_0"), ("Q5_1", "Q8_1"),
    ("Q8_0", "Q8_0"), ("Q1_0", "Q8_0"), ("Q2_0", "Q8_0"), ("IQ4_NL", "Q8_0"), ("MXFP4", "Q8_0"), ("NVFP4", "Q8_0"),
    ("Q2_K", "Q8_K"), ("Q6_K", "Q8_K"), ("IQ4_XS", "Q8_K"), ("IQ1_M", "Q8_K"), ("TQ2_0", "Q8_K")])
def test_dot_type_is_that_of_ggml(dtype: str, dot: str) -> None:
    assert quants.dot_type(dtypes.parse(dtype)) is dtypes.parse(dot)


@pytest.mark.parametrize("bits", [0x7F800001, 0xFFFFFFFF, 0x7F80FFFF])
def test_bf16_keeps_nan(bits: int) -> None:
    x = np.array([bits], np.uint32).view(np.float32)
    assert np.isnan(quants.unpack(quants.pack(x, dtypes.BF16), dtypes.BF16)[0])


@pytest.mark.parametrize("dtype", [dtypes.F16, dtypes.BF16], ids=repr)
def test_every_half_survives(dtype: DType) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    x = quants.unpack(halves.view(np.uint8), dtype)
    again, nan = quants.pack(x, dtype), np.isnan(x)
    assert (again.view(np.uint16) == halves)[~nan].all() and np.isnan(quants.unpack(again, dtype)[nan]).all()


@pytest.mark.parametrize("dtype", quants.PACKABLE, ids=repr)
def test_shapes(dtype: DType) -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((5, 3, 96)).astype(np.float32)
    packed, third = quants.pack(x, dtype), dtype.row_bytes(32)
    assert packed.shape == (5, 3, 3 * third) and packed.dtype == np.uint8
    np.testing.assert_array_equal(quants.pack(x[1, 2, 32:64], dtype), packed[1, 2, third:2 * third])
    np.testing.assert_array_equal(quants.pack(x.transpose(1, 0, 2), dtype), packed.transpose(1, 0, 2))
    assert quants.pack(x[:0], dtype).shape == (0, 3, 3 * third)
    many = np.tile(x[0, 0], 2 * quants.CHUNK // 96)
    np.testing.assert_array_equal(quants.pack(many, dtype).reshape(-1, 3 * third)[-1], packed[0, 0])


def test_refusals() -> None:
    with pytest.raises(ValueError, match="cannot pack into Q4_K; into these: F32, F16, .*IQ4_NL"):
        quants.pack(np.zeros(256, np.float32), dtypes.Q4_K)
    with pytest.raises(ValueError, match="80 elements are not whole blocks of Q8_0"):
        quants.pack(np.zeros((2, 80), np.float32), dtypes.Q8_0)
