"""Attention of many tokens on the emulated device, in tiles: what `ref` gives, for all that a mask, a cache and heads can be."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ggraph import ops, quants
from ggraph.backends import ref
from ggraph.backends.cuda import Cuda, ops_attention
from ggraph.backends.cuda.emulator import Emulator
from ggraph.dtypes import BF16, F16, F32, Q4_0, Q8_0, DType
from ggraph.tensor import Tensor
from tests.backends.cuda.graphs import both
from tests.backends.opcase import Build, Case, nmse, run_case

N_CELLS = 200
SIZES = {"n_tokens": 37, "n_kv": 150}


def causal(g: Build, window: int, n_stream: int) -> Tensor:
    """The tokens are the last of the cells; each sees up to `window` cells back. The last cell is seen by nobody."""
    n_kv, n_tokens = g.shape((g.n_kv, g.n_tokens))[::-1]
    behind = np.arange(n_kv - 1 - n_tokens, n_kv - 1)[:, None] - np.arange(n_kv)
    mask = np.where((behind >= 0) & (behind < window), 0, -np.inf).astype(np.float32)
    return g.leaf(F16, (g.n_kv, g.n_tokens, 1, n_stream), quants.pack(np.repeat(mask[None], n_stream, 0), F16))


def attention(g: Build, type_k: DType = F16, type_v: DType = F16, d: tuple[int, int] = (64, 64), n_head: int = 4,
              n_head_kv: int = 2, n_stream: int = 1, window: int = 1000, sinks: bool = False, mask: bool = True,
              **params: Any) -> Tensor:
    q = ops.permute(g.f32(d[0], n_head, g.n_tokens, n_stream), (0, 2, 1, 3))

    def cached(type: DType, n: int) -> Tensor:
        cells, row = g.any(type, n * n_head_kv, N_CELLS, n_stream), type.row_bytes(n)
        return ops.permute(ops.view(cells, (n, n_head_kv, g.n_kv, n_stream), (row, row * n_head_kv, cells.nb[2])), (0, 2, 1, 3))
    k, v = cached(type_k, d[0]), cached(type_v, d[1])
    return ops.flash_attn_ext(q, k, v, causal(g, window, n_stream) if mask else None, g.f32(n_head) if sinks else None,
                              scale=d[0] ** -0.5, **params)


QUICK: tuple[dict[str, Any], ...] = (
    {}, {"type_k": Q8_0, "type_v": Q4_0}, {"window": 20}, {"sinks": True, "n_head": 14}, {"d": (40, 24)},
    {"mask": False, "n_stream": 2})
MORE: tuple[dict[str, Any], ...] = (
    {"type_k": F32, "type_v": BF16}, {"d": (256, 256), "n_head_kv": 1}, {"d": (192, 128)},
    {"d": (576, 512), "n_head": 16, "n_head_kv": 1}, {"n_head": 71, "n_head_kv": 1}, {"logit_softcap": 2.0},
    {"max_bias": 8.0, "n_head": 6, "n_head_kv": 6}, {"n_head_kv": 4})
FORMS: list[Any] = [*QUICK, *(pytest.param(form, marks=pytest.mark.slow) for form in MORE)]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_tiles(form: dict[str, Any]) -> None:
    case = Case("flash_attn_ext", "tiles", lambda g: attention(g, **form))
    cuda = Cuda(Emulator())
    assert nmse(run_case(cuda, case, SIZES, SIZES), run_case(ref.open(), case, SIZES, SIZES)) < 1e-6
    cuda.close()


def test_the_result_is_quantized_where_a_product_reads_it() -> None:
    def make(g: Build) -> list[Tensor]:
        x = ops.permute(ops.permute(attention(g), (0, 2, 1, 3)), (0, 2, 1, 3))
        return [ops.mul_mat(g.weight(Q8_0, 256, 32), ops.reshape(x, (256, g.n_tokens)))]
    fused, plain, few, _ = both(make, SIZES)
    assert np.array_equal(fused[0], plain[0]) and few == ["tile", "matmul_128"]


def test_heads_too_large_for_tiles_go_token_by_token() -> None:
    case = Case("flash_attn_ext", "tiles", lambda g: attention(g, d=(96, 64)))
    small = Emulator()
    small.max_shared = 64 * 1024
    cuda = Cuda(small)
    assert nmse(run_case(cuda, case, SIZES, SIZES), run_case(ref.open(), case, SIZES, SIZES)) < 1e-6
    assert {kernel.file for kernel in small.functions} == {"attention"}
    cuda.close()


@pytest.mark.parametrize("n_kv", [33, 90, 150])
def test_runs_of_any_length_are_joined(n_kv: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops_attention, "RUNS", ((16, 40), (32, 100), (128, 1 << 62)))
    case, sizes = Case("flash_attn_ext", "runs", lambda g: attention(g, sinks=True, n_head=6)), {"n_tokens": 5, "n_kv": n_kv}
    cuda = Cuda(Emulator())
    largest = {"n_tokens": 5, "n_kv": 150}
    assert nmse(run_case(cuda, case, sizes, largest), run_case(ref.open(), case, sizes, sizes)) < 1e-6
    cuda.close()
