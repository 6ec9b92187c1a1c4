"""What must not bring a device down, where one access out of bounds ends all work on it: NaN, tokens not drawn, old GPUs."""
from __future__ import annotations

import numpy as np
import pytest

from ggraph import ops
from ggraph.backends import ref
from ggraph.backends.cuda import Cuda, source
from ggraph.backends.cuda.device import Kernel
from ggraph.backends.cuda.emulator import Emulator
from ggraph.backends.cuda.lower import can
from ggraph.dtypes import F32, I32, Q8_0, DType
from ggraph.errors import BackendError
from ggraph.tensor import Tensor, leaf
from tests.backends.cuda.graphs import run
from tests.backends.cuda.test_delta import rule
from tests.backends.opcase import Build, Case, nmse, run_case

N_EXPERT, N_USED = 70, 6


def spoiled(g: Build) -> Tensor:
    """Rows of logits: all NaN, some NaN, hardly any that is not -inf, and one of each."""
    x = np.array(g.rng.standard_normal((4, N_EXPERT)), np.float32)
    x[0], x[1, ::2], x[2, 3:], x[3, 0], x[3, 1] = np.nan, np.nan, -np.inf, np.nan, np.inf
    return g.leaf(F32, (N_EXPERT, 4), x)


@pytest.mark.parametrize("gating", ["sigmoid", "soft_max", "none"])
def test_experts_are_chosen_whatever_they_score(gating: str) -> None:
    """As many different ones as are asked for, all of which there are; NaN after the others."""
    def make(g: Build) -> list[Tensor]:
        x = spoiled(g)
        probs = ops.sigmoid(x) if gating == "sigmoid" else ops.soft_max(x) if gating == "soft_max" else x
        return [ops.top_k(probs, N_USED)]
    (chosen,), kernels = run(make)
    assert kernels == (["sort"] if gating == "none" else ["route"])
    rows = chosen.reshape(4, N_USED)
    assert ((rows >= 0) & (rows < N_EXPERT)).all() and all(len(set(row)) == N_USED for row in rows)
    assert gating == "soft_max" or (rows[1] % 2 == 1).all()


@pytest.mark.parametrize("type", [F32, Q8_0], ids=str)
def test_the_row_of_a_token_that_was_not_drawn_is_one_there_is(type: DType) -> None:
    def make(g: Build) -> list[Tensor]:
        table = g.any(type, 64, 5)
        return [ops.get_rows(table, g.leaf(I32, (2,), np.array(ids, np.int32))) for ids in ([-1, 3], [0, 3])]
    (found, expected), _ = run(make)
    assert np.array_equal(found, expected)


def test_blocks_are_no_larger_than_their_kernels_allow() -> None:
    assert source.kernels("sample") == {"sample": 512} and source.kernels("rope")["rope"] == source.USUAL
    device = Emulator()
    with pytest.raises(BackendError, match="kernel sample: a block of 1024 x 1 x 1 threads cannot be launched"):
        device.launch(Kernel("sample", "sample"), (1, 1, 1), (1024, 1, 1), 0, np.zeros(4, np.uint64))
    device.close()


def test_rows_too_long_for_shared_memory_are_sorted_on_the_cpu() -> None:
    """A GPU of compute capability 7.5 has 64 KiB for a block, of which kernels have some beside."""
    small = Emulator()
    small.max_shared = 63 * 1024
    cuda, x = Cuda(small), leaf(F32, (8000,), "x")
    assert cuda.supports(ops.argsort(leaf(F32, (4000,), "x"))) and not cuda.supports(ops.argsort(x)) and can(ops.argsort(x))
    cuda.close()


def test_chunks_that_do_not_fit_shared_memory_are_not_made() -> None:
    """A GPU of compute capability 7.5 has 64 KiB for a block."""
    case, sizes = Case("gated_delta_net", "small", lambda g: rule(g, d=128, n_head=2, n_seqs=1)), {"n_tokens": 64, "n_kv": 64}
    small = Emulator()
    small.max_shared = 64 * 1024
    cuda = Cuda(small)
    assert nmse(run_case(cuda, case, sizes, sizes), run_case(ref.open(), case, sizes, sizes)) < 1e-9
    assert "delta_chunk" not in {kernel.file for kernel in small.functions}
    cuda.close()
