"""Every case of the op table through the emulator: the CUDA kernels give what `ref` gives. By default one type of each family."""
from __future__ import annotations

from typing import Any

import pytest

from ggraph.backends import ref
from ggraph.backends.cuda import Cuda
from ggraph.backends.cuda.emulator import Emulator
from tests.backends.optable import CASES, WEIGHTS, Case, check, sizes_of

QUICK = {"F16", "Q8_0", "Q4_K"}                     # each other type is a compilation more


def heavy(case: Case) -> bool:
    types = {t.name for t in WEIGHTS} - {"F32"}
    return case.op in ("mul_mat", "mul_mat_id", "get_rows", "flash_attn_ext") and any(
        word in types - QUICK for word in case.label.replace("-", " ").split())


PARAMS: list[Any] = [pytest.param(c, marks=[pytest.mark.slow] if heavy(c) else [], id=str(c)) for c in CASES]


@pytest.mark.parametrize("case", PARAMS)
def test_case(case: Case) -> None:
    cuda, definition = Cuda(Emulator()), ref.open()
    check(cuda, definition, case, sizes_of(definition, case))
    cuda.close()
