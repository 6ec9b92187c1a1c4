"""The gated delta rule of many tokens on the emulated device, in chunks: what `ref` gives token by token."""
from __future__ import annotations

import numpy as np
import pytest

from ggraph import ops
from ggraph.backends import ref
from ggraph.backends.cuda import Cuda
from ggraph.backends.cuda.emulator import Emulator
from ggraph.dtypes import F32
from ggraph.tensor import Tensor
from tests.backends.cuda.graphs import run
from tests.backends.opcase import Build, Case, nmse, run_case


def rule(g: Build, d: int = 32, n_key: int = 2, n_head: int = 4, n_seqs: int = 2, fade: float = 0.2) -> Tensor:
    q, k = (ops.rms_norm(g.f32(d, n_key, g.n_tokens, n_seqs), 1e-6) for _ in range(2))
    gates = -fade * g.rng.random(g.shape((1, n_head, g.n_tokens, n_seqs))).astype(np.float32)
    k = ops.scale(k, d ** -0.5)
    return ops.gated_delta_net(q, k, g.f32(d, n_head, g.n_tokens, n_seqs), g.leaf(F32, (1, n_head, g.n_tokens, n_seqs), gates),
                               ops.sigmoid(g.f32(1, n_head, g.n_tokens, n_seqs)), g.f32(d, d, n_head, n_seqs))


@pytest.mark.parametrize("n_tokens", [64, 150])
@pytest.mark.parametrize("form", [{}, {"d": 40, "n_key": 1, "n_seqs": 1}, {"d": 128, "n_head": 2, "n_seqs": 1}, {"fade": 8.0}])
def test_chunks(form: dict[str, int], n_tokens: int) -> None:
    case, sizes = Case("gated_delta_net", "chunks", lambda g: rule(g, **form)), {"n_tokens": n_tokens, "n_kv": 64}
    cuda = Cuda(Emulator())
    assert nmse(run_case(cuda, case, sizes, sizes), run_case(ref.open(), case, sizes, sizes)) < 1e-9
    cuda.close()
    _, kernels = run(lambda g: [rule(g, **form)], sizes)
    assert kernels[-2:] == ["prepare", "chunks"]
