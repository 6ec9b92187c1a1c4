"""Quantizing with a search: the error is near to the least that was ever measured, layouts round-trip, importance counts.

The limits are llama.cpp's errors (ggml_quantize_chunk of llama-cpp-python 0.3.36) on the same numbers, measured with
`python bench/quantize_peer.py --limits` and written down in tests/golden/quantize.json; 1% more is allowed.
"""
from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ggraph import dtypes, quants
from ggraph.dtypes import DType
from tests.quants import samples

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "quantize.json").read_text())
SEARCHED = [t for t in quants.QUANTIZABLE if t.quantized and t not in samples.EXACT]
NEEDS = {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS"}        # llama.cpp makes these only with importance
PAIRS = [(t, weighted) for t in SEARCHED for weighted in (False, True) if weighted or t.name not in NEEDS]
Floats = npt.NDArray[np.float32]


@pytest.mark.parametrize("dtype", samples.EXACT, ids=repr)
def test_plain_types_have_llama_cpps_bytes(dtype: DType) -> None:
    for name, x in samples.rows():
        assert hashlib.sha256(quants.quantize(x, dtype).tobytes()).hexdigest()[:16] == GOLDEN["bytes"][dtype.name][name]


@pytest.mark.parametrize(("dtype", "weighted"), PAIRS, ids=repr)
def test_errors_are_at_most_a_hundredth_above_llama_cpps(dtype: DType, weighted: bool) -> None:
    for name, x in samples.rows():
        importance = samples.importance(x.shape[1]) if weighted else None
        got = samples.error(x, quants.quantize(x, dtype, importance), dtype, importance)
        assert got <= 1.01 * GOLDEN["errors"][dtype.name][f"{name} {weighted}"], name


@pytest.mark.parametrize("dtype", [t for t in quants.QUANTIZABLE if t.quantized], ids=repr)
def test_codes_land_where_they_are_read(dtype: DType) -> None:
    """What a type can express exactly comes back nearly exactly, so every field is in its place."""
    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 256, (16, dtype.nbytes), np.uint8)
    view = blocks.view(quants.QUANTS[dtype].layout).reshape(-1)
    for name in ("d", "dmin", "m"):
        if name in (view.dtype.names or ()):
            view[name] = 0.01 if name == "d" else 0.02
    if dtype.name == "IQ1_M":
        for i in range(4):
            blocks[:, 49 + 2 * i] = (blocks[:, 49 + 2 * i] & 15) | (int(np.float16(0.01).view(np.uint16)) >> (4 * i) & 15) << 4
    if dtype.name == "MXFP4":
        blocks[:, 0] = 120
    if dtype.name == "TQ1_0":
        blocks = quants.quantize(rng.integers(-1, 2, (16, 256)).astype(np.float32), dtype)
    if dtype.name == "TQ2_0":
        blocks[:, :64] &= 0xAA
    x = quants.unpack(blocks, dtype)
    again = quants.unpack(quants.quantize(x, dtype), dtype)
    limit = 0.35 if "IQ1" in dtype.name else 0.25 if "IQ2" in dtype.name else 0.12
    assert np.sqrt(np.mean((again - x) ** 2) / np.mean(x * x)) < limit


@pytest.mark.parametrize("dtype", [t for t in quants.QUANTIZABLE if quants.QUANTS[t].spread is not None], ids=repr)
def test_importance_moves_the_error(dtype: DType) -> None:
    """Columns that count a thousand times as much are nearer to what they were."""
    x = np.random.default_rng(6).standard_normal((32, 256)).astype(np.float32)
    importance = np.ones(256, np.float32)
    importance[::4] = 1000
    miss = [np.mean((quants.unpack(quants.quantize(x, dtype, w), dtype) - x)[:, ::4] ** 2) for w in (None, importance)]
    assert miss[1] < miss[0]


def test_zeros_stay_zeros() -> None:
    for dtype in quants.QUANTIZABLE:
        assert not np.abs(quants.unpack(quants.quantize(np.zeros((2, 256), np.float32), dtype), dtype)).max()


def test_what_it_refuses() -> None:
    x = np.zeros((1, 256), np.float32)
    x[0, 7] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        quants.quantize(x, dtypes.Q4_K)
    with pytest.raises(ValueError, match="whole blocks"):
        quants.quantize(np.zeros((1, 64), np.float32), dtypes.Q4_K)
    with pytest.raises(ValueError, match="cannot quantize to Q8_K"):
        quants.quantize(x, dtypes.Q8_K)


def test_rows_do_not_depend_on_each_other() -> None:
    x: Any = np.random.default_rng(7).standard_normal((40, 512)).astype(np.float32)
    for dtype in (dtypes.Q4_K, dtypes.IQ3_S, dtypes.Q5_1):
        whole = quants.quantize(x, dtype, samples.importance(512))
        parts = [quants.quantize(part, dtype, samples.importance(512)) for part in (x[:7], x[7:])]
        assert np.array_equal(whole, np.concatenate(parts))


def test_nothing_is_compiled_before_it_is_asked_for() -> None:
    code = ("import sys, numpy, ggraph.quants as q, ggraph.dtypes as t; q.quantize(numpy.ones((1, 256), 'f4'), t.Q4_0); "
            "assert 'numba' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)
