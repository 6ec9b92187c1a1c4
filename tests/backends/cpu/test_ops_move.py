"""Moving data: unpacked and packed blocks to the bit, any layout, no rows, row numbers out of range."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggraph import ops, quants
from ggraph.backends import ref
from ggraph.backends.cpu import pack, unpack
from ggraph.backends.cpu.pool import KernelError
from ggraph.dtypes import BF16, F16, F32, TYPES, DType
from tests.backends.cpu.plans import Array, Native, evaluate, tensor
from tests.backends.optable import CASES, Case, run_case

RNG = np.random.default_rng(13)
CPU, CPU2, REF = Native(1), Native(2), ref.open()
UNPACKED = [t for t in TYPES.values() if unpack.unpacks(t)]
PACKED = [t for t in TYPES.values() if pack.packs(t)]
PLAIN = (F32, F16, BF16)


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("dtype", UNPACKED, ids=str)
def test_any_block_unpacks_as_quants_does(dtype: DType) -> None:
    """Random bits, so that scales are subnormal, infinite and NaN too."""
    raw = RNG.integers(0, 256, (64, 3 * dtype.nbytes), np.uint8)
    for i in range(dtype.nbytes):
        raw[i % 64, i], raw[(i + 7) % 64, i] = 0, 255
    result = evaluate(ops.cast(tensor(raw, dtype), F32), CPU2)
    assert not CPU2.fallback
    assert np.array_equal(result[0, 0].view(np.uint32)[~np.isnan(result[0, 0])],
                          quants.unpack(raw, dtype).view(np.uint32)[~np.isnan(result[0, 0])])
    assert np.array_equal(np.isnan(result[0, 0]), np.isnan(quants.unpack(raw, dtype)))


def extreme_rows() -> Array:
    """Rows of 32 where rounding and ties show."""
    ties = np.tile(np.array([1, -1, 0.5, -0.5], np.float32), 8)
    steps = np.arange(32, dtype=np.float32) - 16
    rows = [np.zeros(32), -np.zeros(32), ties, -ties, steps, -steps, steps + 0.5, np.full(32, 3.0), np.full(32, -3.0),
            np.where(steps == 3, np.inf, steps), np.where(steps == 3, -np.inf, steps), steps * 1e-40, steps * 1e-42,
            steps * 1e36, steps * 1e-16, np.full(32, 65504.0) * steps, np.where(steps == 5, np.nan, steps)]
    random = [normal(32) * 10.0 ** e for e in range(-6, 6)] + [np.round(normal(32) * 4) for _ in range(40)]
    return np.array([*rows, *random], np.float32)


@pytest.mark.parametrize("dtype", PACKED, ids=str)
def test_blocks_are_packed_to_the_bit(dtype: DType) -> None:
    x = extreme_rows()
    node = ops.cast(tensor(x), dtype)
    evaluate(node, CPU2)
    assert not CPU2.fallback
    result = node.buffer.data[:int(node.nbytes)].reshape(len(x), -1)
    expected = quants.pack(x, dtype)
    whole = ~np.isnan(x).any(-1)                                # a NaN may have any sign and payload
    assert np.array_equal(result[whole], expected[whole]), np.flatnonzero((result != expected).any(-1))
    values = quants.unpack(result, dtype), quants.unpack(expected, dtype)
    assert np.array_equal(np.isnan(values[0]), np.isnan(values[1]))


@pytest.mark.parametrize("dtype", [F32, F16, BF16, *PACKED], ids=str)
def test_rows_are_set_as_quants_packs_them(dtype: DType) -> None:
    x, rows = normal(5, 64), np.array([3, 0, 8, 6, 1], np.int32)
    before = quants.pack(normal(9, 64), dtype)
    dst = tensor(before, dtype)
    evaluate(ops.set_rows(dst, tensor(x), tensor(rows)), CPU2)
    assert not CPU2.fallback
    expected = before.copy()
    expected[rows] = quants.pack(x, dtype)
    assert np.array_equal(dst.buffer.data, expected.reshape(-1))


@settings(max_examples=40, deadline=None)
@given(st.permutations(range(4)), st.tuples(*[st.integers(1, 20)] * 2, *[st.integers(1, 3)] * 2),
       st.sampled_from(PLAIN), st.sampled_from(PLAIN))
def test_copies_of_any_layout(axes: list[int], ne: tuple[int, ...], src: DType, dst: DType) -> None:
    node = ops.cast(ops.permute(tensor(quants.pack(normal(*ne[::-1]), src), src), axes), dst)
    result = evaluate(node, CPU2)
    assert not CPU2.fallback
    assert np.array_equal(result, evaluate(node, REF))


@pytest.mark.parametrize("bad", [-1, 9, -2 ** 31])
def test_row_numbers_out_of_range_are_errors(bad: int) -> None:
    rows = tensor(np.array([0, bad, 1], np.int32))
    with pytest.raises(KernelError):
        evaluate(ops.get_rows(tensor(normal(9, 32)), rows), CPU)
    with pytest.raises(KernelError):
        evaluate(ops.set_rows(tensor(normal(9, 32)), tensor(normal(3, 32)), rows), CPU)
    assert np.array_equal(evaluate(ops.scale(tensor(normal(3)), 0.0), CPU)[0, 0, 0], np.zeros(3))


@pytest.mark.parametrize("op", ["get_rows", "set_rows", "cont", "add", "gelu", "rms_norm", "top_k", "concat"])
def test_no_tokens_are_no_work(op: str) -> None:
    case: Case = next(c for c in CASES if c.op == op and c.label in ("", "F32", "row", "large", "state", "shape"))
    empty = {"n_tokens": 0, "n_kv": 32}
    assert np.array_equal(run_case(CPU2, case, empty), run_case(REF, case, empty))
