"""Every case of the op table whose op has a kernel: no fallback, `ref`'s result, the same bits with two threads."""
from __future__ import annotations

import numpy as np
import pytest

from ggraph import ops
from ggraph.backends import ref
from ggraph.dtypes import TYPES
from tests.backends.cpu.native import RARE
from tests.backends.cpu.plans import Native
from tests.backends.opcase import nmse
from tests.backends.optable import CASES, Case, run_case, sizes_of

NATIVE = {"view", "reshape", "permute", "transpose", "cont", "cast", "cpy", "get_rows", "set_rows", "concat", "repeat",
          "fill", "arange", "pad", "roll", "diag", "tri", "add", "sub", "mul", "div", "add_id", "scale", "clamp",
          "norm", "rms_norm", "l2_norm", "group_norm", "sum_rows", "mean", "cumsum", "pool_1d", "hadamard", "argsort",
          "top_k", "rope", "swiglu_oai", "swiglu_clamp", "ssm_conv", "ssm_scan", "gated_delta_net",
          "gated_linear_attn", "rwkv_wkv6", "rwkv_wkv7", *ops.UNARY, *ops.GLU}
EXACT = {"view", "reshape", "permute", "transpose", "cont", "cast", "cpy", "get_rows", "set_rows", "concat", "repeat",
         "fill", "arange", "pad", "roll", "diag", "tri", "add", "sub", "mul", "div", "add_id", "scale", "clamp",
         "abs", "neg", "sqr", "sqrt", "relu", "step", "sgn", "argsort", "top_k", "cumsum", "pool_1d"}


@pytest.mark.parametrize("case", [c for c in CASES if c.op in NATIVE], ids=str)
def test_case(case: Case) -> None:
    one, two, definition = Native(1), Native(2), ref.open()
    for present in sizes_of(one, case):
        result, expected = run_case(one, case, present), run_case(definition, case, present)
        assert not one.fallback
        assert np.array_equal(result, run_case(two, case, present), equal_nan=True)
        if case.op in EXACT:
            assert np.array_equal(result, expected, equal_nan=True)
        else:
            assert nmse(result, expected) < 1e-12


@pytest.mark.parametrize("case", [
    pytest.param(c, marks=[pytest.mark.slow] if c.label in RARE else [])
    for c in CASES if c.op in ("mul_mat", "mul_mat_id") and c.label in TYPES and TYPES[c.label].block < 256], ids=str)
def test_product(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `ref`'s, whose activations are rounded alike: exact for plain types, as in ggml for blocks of 32."""
    one, two, definition = Native(1), Native(2), ref.open()
    rounded = TYPES[case.label].quantized or case.label == "BF16"
    monkeypatch.setenv("GGRAPH_REF", "ggml" if rounded else "exact")
    for present in sizes_of(one, case):
        result = run_case(one, case, present)
        assert not one.fallback
        assert np.array_equal(result, run_case(two, case, present))
        assert nmse(result, run_case(definition, case, present)) < (1e-6 if TYPES[case.label].quantized else 1e-12)
