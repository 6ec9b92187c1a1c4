"""Unpacking: bit for bit the `gguf` package where that has the type, llama.cpp's C or the layout by hand elsewhere."""
from __future__ import annotations

import struct
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import gguf as package
import gguf.quants
import numpy as np
import numpy.typing as npt
import pytest

from ggraph import dtypes, quants
from ggraph.dtypes import DType

GOLDEN = Path(__file__).parents[1] / "golden" / "quants.npz"
INTEGERS = [dtypes.I8, dtypes.I16, dtypes.I32, dtypes.I64]
NOT_IN_PACKAGE = [dtypes.Q8_1, dtypes.Q8_K, dtypes.Q1_0, dtypes.Q2_0, dtypes.F64, *INTEGERS]
IN_PACKAGE = [t for t in dtypes.TYPES.values() if t not in NOT_IN_PACKAGE]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# zero, smallest and largest subnormal, smallest normal, one, largest, infinity, quiet and signalling NaN; both signs
HALVES = np.array([0, 1, 0x3FF, 0x400, 0x3C00, 0x7BFF, 0x7C00, 0x7E00, 0x7C01], np.uint16)
HALVES = np.concatenate([HALVES, HALVES | np.uint16(0x8000)])


def all_bytes(dtype: DType, seed: int = 0) -> Bytes:
    """256 blocks in which every byte takes every value once."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(256) for _ in range(dtype.nbytes)], axis=1).astype(np.uint8)


def with_scales(dtype: DType) -> Bytes:
    """Random blocks with each of HALVES in each half-precision field, and all pairs of them where there are two."""
    rng = np.random.default_rng(1)
    layout = quants.QUANTS[dtype].layout
    fields = [name for name in layout.names or () if layout[name] == np.dtype("<f2")]
    pairs = np.stack(np.meshgrid(HALVES, HALVES), -1).reshape(-1, 2)
    blocks: Any = rng.integers(0, 256, (len(pairs), dtype.nbytes), dtype=np.uint8).view(layout)[:, 0]
    for i, name in enumerate(fields):
        blocks[name] = pairs[:, i].view(np.float16)
    if dtype is dtypes.IQ1_M:       # its d lies in the top nibbles of four words
        blocks["scales"] = blocks["scales"] & 0xFFF | (pairs[:, :1] >> np.arange(0, 16, 4) & 15) << 12
    return np.ascontiguousarray(blocks).view(np.uint8).reshape(-1, dtype.nbytes)


def reference(data: Bytes, dtype: DType) -> Floats:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        out: Floats = gguf.quants.dequantize(data, package.GGMLQuantizationType[dtype.name])
    return out


def same(got: Floats, want: Floats) -> None:
    """Equal bit for bit, signs of zeros too; any NaN equals any other."""
    assert got.dtype == want.dtype == np.float32 and got.shape == want.shape
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(np.where(nan, 0, got.view(np.uint32)), np.where(nan, 0, want.view(np.uint32)))


@pytest.mark.parametrize("dtype", IN_PACKAGE, ids=repr)
@pytest.mark.parametrize("blocks", [all_bytes, with_scales])
def test_equals_the_package(dtype: DType, blocks: Any) -> None:
    data = blocks(dtype)
    same(quants.unpack(data, dtype), reference(data, dtype))


@pytest.mark.parametrize("dtype", [dtypes.Q1_0, dtypes.Q2_0, dtypes.Q8_K], ids=repr)
def test_equals_llama_cpp(dtype: DType) -> None:
    """The golden file holds random blocks and what dequantize_row_* of ggml-quants.c makes of them."""
    golden = np.load(GOLDEN)
    same(quants.unpack(golden[f"blocks_{dtype}"], dtype), golden[f"unpacked_{dtype}"])


def half(x: float) -> bytes:
    return struct.pack("<e", x)


BY_HAND: list[tuple[DType, bytes, dict[int, float]]] = [
    # bit i of byte i // 8 is the sign of element i
    (dtypes.Q1_0, half(1.5) + b"\x05" + bytes(14) + b"\x80", {0: 1.5, 1: -1.5, 2: 1.5, 126: -1.5, 127: 1.5}),
    # codes 0, 1, 2, 3 from the lowest bits up
    (dtypes.Q2_0, half(2) + b"\xe4" + bytes(14) + b"\x40", {0: -2, 1: 0, 2: 2, 3: 4, 60: -2, 63: 0}),
    (dtypes.Q8_1, half(0.5) + half(77) + bytes([1, 0x80]) + bytes(29) + b"\x7f", {0: 0.5, 1: -64, 2: 0, 31: 63.5}),
    (dtypes.Q8_K, struct.pack("<f", 0.25) + bytes([4]) + bytes(254) + b"\xff" + b"\x11" * 32, {0: 1, 1: 0, 255: -0.25}),
    # byte j: element j low, element j + 16 high
    (dtypes.Q4_0, half(2) + b"\x1f" + bytes(14) + b"\xc8", {0: 14, 16: -14, 15: 0, 31: 8, 1: -16}),
    # scale code 128 is 2**0 of values that are stored doubled: 0.5, 1, ... 6
    (dtypes.MXFP4, bytes([128]) + b"\x21" + bytes(14) + b"\xf7", {0: 1, 16: 2, 15: 12, 31: -12, 1: 0}),
    (dtypes.MXFP4, bytes([0]) + b"\x01" + bytes(15), {0: 2.0**-128, 1: 0}),
    # four scales: 0x38 is 1.0 (exponent 7), 0x01 the subnormal 2**-9, 0x7F reads as 0, 0x7E is 448; codes 1 and 7
    (dtypes.NVFP4, bytes([0x38, 0x01, 0x7F, 0x7E]) + (b"\x71" + bytes(7)) * 4,
     {0: 0.5, 8: 6, 16: 2.0**-10, 24: 6 * 2.0**-9, 32: 0, 40: 0, 48: 224, 56: 2688}),
    # one trit a byte in the top digit: 2 * 81 * 256 / 243 rounded up
    (dtypes.TQ1_0, bytes([171]) + bytes(47) + b"\xab" + bytes(3) + half(3), {0: 3, 1: -3, 32: -3, 240: 3, 255: -3}),
    (dtypes.TQ2_0, b"\xe4" + bytes(63) + half(1), {0: -1, 32: 0, 64: 1, 96: 2, 128: -1}),
    (dtypes.BF16, b"\x80\xbf", {0: -1}),
    (dtypes.F64, struct.pack("<d", 1e300), {0: float("inf")}),
    (dtypes.I8, b"\x80", {0: -128}), (dtypes.I16, b"\xfe\xff", {0: -2}),
    (dtypes.I32, b"\xfd\xff\xff\xff", {0: -3}), (dtypes.I64, b"\x01" + bytes(6) + b"\x80", {0: -2.0**63}),
]


@pytest.mark.parametrize(("dtype", "block", "values"), BY_HAND, ids=lambda v: repr(v) if isinstance(v, DType) else "")
def test_blocks_by_hand(dtype: DType, block: bytes, values: dict[int, float]) -> None:
    out = quants.unpack(np.frombuffer(block, np.uint8), dtype)
    assert {i: out[i] for i in values} == values


@pytest.mark.parametrize("dtype", dtypes.TYPES.values(), ids=repr)
def test_shapes_and_strides(dtype: DType) -> None:
    """Any leading axes, views with gaps, unaligned bytes, no rows at all, more elements than one chunk."""
    rng = np.random.default_rng(2)
    n = 2 * max(1, quants.CHUNK // dtype.block) + 3
    data = rng.integers(0, 256, n * dtype.nbytes + 1, dtype=np.uint8)[1:]
    data.flags.writeable = False
    flat = quants.unpack(data, dtype)
    assert flat.shape == (n * dtype.block,) and flat.flags.writeable
    same(quants.unpack(data[-dtype.nbytes:], dtype), flat[-dtype.block:])
    grid = data[:12 * dtype.nbytes].reshape(2, 3, 2 * dtype.nbytes)
    want = flat[:12 * dtype.block].reshape(2, 3, -1)
    same(quants.unpack(grid, dtype), want)
    same(quants.unpack(grid[::-1, ::2], dtype), want[::-1, ::2])
    same(quants.unpack(grid[:, :, dtype.nbytes:], dtype), want[:, :, dtype.block:])
    assert quants.unpack(grid[:0], dtype).shape == (0, 3, 2 * dtype.block)
    assert quants.unpack(grid[:, :, :0], dtype).shape == (2, 3, 0)


def test_every_type_is_there_and_rows_must_be_whole() -> None:
    assert set(quants.QUANTS) == set(dtypes.TYPES.values())
    with pytest.raises(ValueError, match="35 bytes are not whole blocks of Q8_0"):
        quants.unpack(np.zeros(35, np.uint8), dtypes.Q8_0)


def test_needs_numpy_only() -> None:
    code = "import sys, ggraph.quants; print(sorted({'gguf', 'numba', 'ggraph.gguf'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
