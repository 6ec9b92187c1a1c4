"""The op table: every op has its row, its ref kernel and its cases; rows check shapes; docs/ops.md is up to date."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ggraph import ops
from ggraph.backend import open_backend
from ggraph.backends.ref import KERNELS
from ggraph.dtypes import F16, F32, I32, Q8_0
from ggraph.ops import OPS, VIEWS
from ggraph.size import Size
from ggraph.tensor import Tensor, leaf
from tests.backends.opcase import nodes_of
from tests.backends.optable import CASES, markdown

DOCS = Path(__file__).parents[1] / "docs/ops.md"
REF = open_backend("ref")


def f32(*ne: int) -> Tensor:
    return leaf(F32, ne, "x")


def i32(*ne: int) -> Tensor:
    return leaf(I32, ne, "i")


@pytest.mark.parametrize("name", OPS)
def test_every_op_has_a_kernel_a_case_and_a_meaning(name: str) -> None:
    assert name in KERNELS or name in VIEWS, f"backends/ref has no kernel {name}"
    assert any(case.op == name for case in CASES), f"tests/backends/optable.py has no case for {name}"
    assert OPS[name].__doc__, f"{name} has no docstring"


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_has_a_row(name: str) -> None:
    assert name in OPS


def test_names_of_cases_are_unique() -> None:
    names = [str(case) for case in CASES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_case_is_about_its_op(case: object) -> None:
    assert isinstance(case, tuple)
    node = case.build(REF)[1]                       # type: ignore[attr-defined]
    assert case.op in {n.op for n in nodes_of(node)}    # type: ignore[attr-defined]


def test_docs_are_made_from_the_table() -> None:
    assert DOCS.read_text() == markdown(REF), "python -m tests.backends.optable > docs/ops.md"


WRONG: dict[str, Callable[[], Tensor]] = {
    "reshape of a view": lambda: ops.reshape(ops.transpose(f32(4, 3)), (12,)),
    "reshape to another size": lambda: ops.reshape(f32(4, 3), (11,)),
    "cpy to another size": lambda: ops.cpy(f32(4), f32(5)),
    "get_rows with F32 rows": lambda: ops.get_rows(f32(4, 3), f32(2)),
    "get_rows over other batches": lambda: ops.get_rows(f32(4, 3, 2), i32(2, 3)),
    "set_rows of another length": lambda: ops.set_rows(f32(4, 9), f32(5, 2), i32(2)),
    "set_rows with too few numbers": lambda: ops.set_rows(f32(4, 9), f32(4, 2), i32(3)),
    "concat of other types": lambda: ops.concat(f32(4), leaf(F16, (4,), "x"), 0),
    "concat of other rows": lambda: ops.concat(f32(4, 2), f32(4, 3), 0),
    "mul_mat of other rows": lambda: ops.mul_mat(f32(4, 3), f32(5, 2)),
    "mul_mat of other heads": lambda: ops.mul_mat(f32(4, 3, 2), f32(4, 2, 3)),
    "add of what does not repeat": lambda: ops.add(f32(4, 3), f32(4, 2)),
    "rope of an odd width": lambda: ops.rope(f32(8, 1, 2), i32(2), None, n_dims=3, mode=0, freq_base=1e4),
    "rope of too wide a head": lambda: ops.rope(f32(8, 1, 2), i32(2), None, n_dims=8, mode=0, freq_base=1e4, offset=2),
    "rope without positions": lambda: ops.rope(f32(8, 1, 2), i32(2), None, n_dims=8, mode=ops.MROPE, freq_base=1e4),
    "soft_max with another mask": lambda: ops.soft_max(f32(8, 2), f32(8, 3)),
    "top_k of too few": lambda: ops.top_k(f32(3), 4),
    "pad of a size": lambda: ops.pad(f32(3), (1,), (Size.variable("n", 2),)),
    "attention over other cells": lambda: ops.flash_attn_ext(f32(8, 2, 4), f32(8, 5, 2), f32(8, 6, 2), None, scale=1.0),
    "gated_delta_net of another state": lambda: ops.gated_delta_net(
        f32(8, 2, 3), f32(8, 2, 3), f32(8, 2, 3), f32(1, 2, 3), f32(1, 2, 3), f32(8, 8, 3)),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_row_refuses(what: str) -> None:
    with pytest.raises(ValueError):
        WRONG[what]()


def test_views_share_the_bytes_of_their_root() -> None:
    x = leaf(Q8_0, (64, 6, 2), "x")
    row = x.nb[1]
    window = ops.view(x, (64, 2), (row,), offset=3 * row)
    again = ops.view(window, (32, 1), (row,), offset=row + 34)
    assert again.view_src is x and again.view_offs == 4 * row + 34
    assert not window.contiguous or window.ne[1] == 2
    turned = ops.permute(x, (0, 2, 1, 3))
    assert turned.ne == (64, 2, 6, 1) and turned.nb == (34, 6 * row, row, 12 * row) and not turned.contiguous


def test_writing_ops_are_views_of_what_they_write() -> None:
    cache = leaf(F16, (8, 16), "cache")
    part = ops.view(cache, (8, 4), (16,), offset=32)
    for node in (ops.cpy(f32(8, 4), part), ops.set_rows(part, f32(8, 2), i32(2))):
        assert node.view_src is cache and node.view_offs == 32 and node.type is F16


def test_shapes_keep_the_polynomial_of_sizes() -> None:
    n = Size.variable("n_tokens", 8)
    x = ops.reshape(f32(64, n), (16, 4, n))
    node = ops.mul_mat(ops.permute(x, (0, 2, 1, 3)), ops.permute(x, (0, 2, 1, 3)))
    assert node.ne == (8, 8, 4, 1)
    assert isinstance(node.numel, Size) and node.numel.terms == {("n_tokens", "n_tokens"): 4}
