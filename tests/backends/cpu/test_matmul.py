"""Products with panels: close to exact arithmetic, and the same bits for every tile, batch and number of threads."""
from __future__ import annotations

import numpy as np
import pytest

from ggraph import dtypes, quants
from ggraph.backends.cpu import activation, matmul, matmul_id, matmul_many, repack, targets
from ggraph.backends.cpu.pool import SINGLE, KernelError
from ggraph.dtypes import DType
from tests.backends.cpu.native import TYPES, aligned, block, panels, product, random_rows, rounded, run, tensor, tiles

N_ROWS = 40                                     # two whole panels and a part of one
RNG = np.random.default_rng(3)


def _inputs(dtype: DType, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rows, the same as f64, activations). Plain types get a k that nothing divides."""
    k = 77 if dtype in repack.PLAIN else 2 * max(dtype.block, 64)
    raw = random_rows(dtype, N_ROWS, k)
    return raw, quants.unpack(raw, dtype).astype(np.float64), RNG.standard_normal((n, k)).astype(np.float32)


def tolerance(dtype: DType) -> float:
    """Of the largest result: rounding, and for some types that of the activations' sums to f16."""
    return 1e-3 if dtype in matmul.SUMS_F16 else 2e-6


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_products_are_exact_to_rounding_and_alike_for_all_widths_and_threads(dtype: DType) -> None:
    raw, w, x = _inputs(dtype, 23)
    packed = panels(raw, dtype, x.shape[1], n_threads=2)
    out = product(packed, x, dtype, N_ROWS, n_threads=2)
    exact = rounded(x, dtype) @ w.T
    assert np.abs(out - exact).max() <= tolerance(dtype) * np.abs(exact).max()
    for n in range(1, 2 * activation.width()):
        for first in (0, 5):
            part = product(packed, x[first:first + n], dtype, N_ROWS)
            assert np.array_equal(part, out[first:first + n]), (n, first)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_many_columns_get_the_bits_of_one(dtype: DType) -> None:
    """Enough of them that weights are unpacked first, in one part of k or two; columns and panels are left over."""
    n = matmul_many.MOST + matmul_many.LEAST + 5
    for k, n_threads in ((max(dtype.block, 32), 2), (1280, 1), (1280, 2)):
        raw, x = random_rows(dtype, 3 * N_ROWS, k), RNG.standard_normal((n, k)).astype(np.float32)
        packed = panels(raw, dtype, k)
        out = product(packed, x, dtype, len(raw), n_threads)
        for t in (*range(9), 31, 32, 255, 256, 257, n - 5, n - 1):
            assert np.array_equal(out[t], product(packed, x[t:t + 1], dtype, len(raw))[0]), (k, t)


@pytest.mark.parametrize("lowering", [name for name in ("avxvnni", "avx2", "generic") if name in targets.runnable()])
@pytest.mark.parametrize("dtype", [dtypes.Q5_1, dtypes.Q3_K, dtypes.BF16, dtypes.F16], ids=str)
def test_every_lowering_that_runs_here_agrees(dtype: DType, lowering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, w, x = _inputs(dtype, 7)
    packed, exact = panels(raw, dtype, x.shape[1]), rounded(x, dtype) @ w.T
    monkeypatch.setenv("GGRAPH_CPU", lowering)
    assert np.abs(product(packed, x, dtype, N_ROWS) - exact).max() <= tolerance(dtype) * np.abs(exact).max()


@pytest.mark.parametrize("lowering", targets.runnable())
def test_the_largest_codes_are_exact(lowering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes 255 and 1 times +-127 in whole rows: where a byte product saturates, or a bias is rounded, this shows."""
    monkeypatch.setenv("GGRAPH_CPU", lowering)
    values = np.tile([[127.0], [-127.0]], (8, 512)).astype(np.float32)
    packed = panels(quants.pack(values, dtypes.Q8_0), dtypes.Q8_0, 512)
    x = np.stack([np.full(512, 127.0), np.full(512, -127.0), np.tile([127.0, -127.0], 256)]).astype(np.float32)
    assert np.array_equal(product(packed, x, dtypes.Q8_0, 16), x @ values.T)


def test_batches_of_columns_beyond_the_cache_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """k so long that a batch holds few columns, and more columns than one batch."""
    k = matmul.L2 // 3 // 48 * 32 // 256 * 256
    raw = random_rows(dtypes.Q4_0, 16, k)
    x = RNG.standard_normal((21, k)).astype(np.float32)
    packed = panels(raw, dtypes.Q4_0, k)
    assert np.array_equal(product(packed, x, dtypes.Q4_0, 16)[13:14], product(packed, x[13:14], dtypes.Q4_0, 16))


def test_activations_may_have_outer_axes_and_any_strides() -> None:
    dtype, n_rows = dtypes.Q4_1, 16
    raw = random_rows(dtype, n_rows, 64)
    packed = panels(raw, dtype, 64)
    x = RNG.standard_normal((2, 5, 3, 64)).astype(np.float32)
    turned = x.transpose(1, 0, 2, 3)
    out = np.zeros((5, 2, 3, n_rows), np.float32)
    act = aligned(activation.nbytes(activation.Q8, 64, 30))
    run([(activation.activation_kernel(activation.Q8), block(*tensor(turned), act)),
         (matmul.matmul_kernel(dtype), block(*tensor(out), act, packed, 64))], 2)
    flat = product(packed, x.reshape(30, 64), dtype, n_rows).reshape(2, 5, 3, n_rows)
    assert np.array_equal(out, flat.transpose(1, 0, 2, 3))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    raw, _, x = _inputs(dtypes.Q4_0, 1)
    x[0, 3] = bad
    out = product(panels(raw, dtypes.Q4_0, x.shape[1]), x, dtypes.Q4_0, N_ROWS)
    assert not np.isfinite(out).any()


def test_activations_are_rounded_to_the_nearest_of_127_steps() -> None:
    x = np.concatenate([np.linspace(-3, 3, 64), np.zeros(32), np.full(32, 1e-40)]).astype(np.float32)[None]
    blocks = tiles(x, dtypes.Q4_0).reshape(4, activation.BLOCK)
    d = blocks[:, :4].copy().view(np.float32)[:, 0]
    q = blocks[:, 16:].view(np.int8)
    assert np.abs(rounded(x, dtypes.Q4_0) - x).max() <= d.max() * 0.51
    assert np.array_equal(blocks[:, 8:16].copy().view(np.int32), np.stack([q.sum(1), q[:, :16].sum(1)], 1))
    total = d * q.sum(1)
    assert np.array_equal(blocks[:, 4:8].copy().view(np.float32)[:, 0], total.astype(np.float16).astype(np.float32))
    assert not q[2:].any()


@pytest.mark.parametrize("dtype", [dtypes.Q4_K, dtypes.F16, dtypes.BF16], ids=str)
@pytest.mark.parametrize("shared", [True, False], ids=["one row per token", "one row per slot"])
@pytest.mark.parametrize("n_tokens", [19, 90])               # 90: experts with so many that weights are unpacked first
def test_experts_give_the_bits_of_plain_products(dtype: DType, shared: bool, n_tokens: int) -> None:
    n_expert, n_used, k = 6, 3, 256
    raw = random_rows(dtype, n_expert * N_ROWS, k).reshape(n_expert, N_ROWS, -1)
    packed = np.stack([panels(matrix, dtype, k) for matrix in raw])
    per_token = 1 if shared else n_used
    x = RNG.standard_normal((n_tokens, per_token, k)).astype(np.float32)
    ids = np.stack([RNG.permutation(n_expert - 1)[:n_used] for _ in range(n_tokens)]).astype(np.int32)   # one idle
    for n_threads in (1, 2):
        out = _experts(packed, x, ids, dtype, n_threads)
        for t in range(n_tokens):
            for j in range(n_used):
                alone = product(packed[ids[t, j]], x[t, 0 if shared else j][None], dtype, N_ROWS)
                assert np.array_equal(out[t, j], alone[0])


def _experts(packed: np.ndarray, x: np.ndarray, ids: np.ndarray, dtype: DType, n_threads: int) -> np.ndarray:
    (n_tokens, n_used), k, n_expert = ids.shape, x.shape[-1], len(packed)
    out = np.full((n_tokens, n_used, N_ROWS), np.nan, np.float32)
    rows = tiles(x, dtype, rows=True)
    act = aligned(activation.nbytes(activation.form(dtype), k, ids.size))
    groups = aligned(matmul_id.group_bytes(n_expert, ids.size))
    run([(matmul_id.group_kernel, block(*tensor(ids), groups, n_expert), SINGLE),
         (matmul_id.gather_kernel(dtype), block(rows, x.shape[1], groups, n_expert, n_used, act, k)),
         (matmul_id.matmul_id_kernel(dtype), block(*tensor(out), act, packed, k, groups, n_expert))], n_threads)
    return out


@pytest.mark.parametrize("bad", [-1, 6])
def test_an_id_that_names_no_expert_is_an_error(bad: int) -> None:
    ids = np.array([[0, bad]], np.int32)
    with pytest.raises(KernelError) as e:
        run([(matmul_id.group_kernel, block(*tensor(ids), aligned(matmul_id.group_bytes(6, 2)), 6), SINGLE)])
    assert e.value.code == matmul_id.BAD_ID


INSTRUCTIONS = {"avx512vnni": "vpdpbusd", "avxvnni": "vpdpbusd", "avx2": "vpmaddwd", "neon": "sdot"}


@pytest.mark.parametrize("lowering", INSTRUCTIONS)
def test_the_assembly_for_each_target_holds_its_dot_product(lowering: str) -> None:
    target = targets.LEAST[lowering]
    with targets.using(target):
        kernel = matmul.matmul_kernel(dtypes.Q8_0)
    assembly = kernel.assembly(target)
    n_columns = (8 + 4 + 2 + 1) if lowering == "avx512vnni" else 4 + 2 + 1
    assert assembly.count(INSTRUCTIONS[lowering]) >= 8 * n_columns


def test_bf16_takes_the_instruction_for_pairs_where_there_is_one() -> None:
    target = targets.LEAST["avx512vnni"]
    target = target._replace(features=target.features + ",+avx512bf16")
    with targets.using(target):
        kernel = matmul.matmul_kernel(dtypes.BF16)
    assert kernel.assembly(target).count("vdpbf16ps") >= 8 + 4 + 2 + 1
    with targets.using(targets.LEAST["avx2"]):
        kernel = matmul.matmul_kernel(dtypes.BF16)
    assert "vdpbf16ps" not in kernel.assembly(targets.LEAST["avx2"])
