"""Tensors: shapes, strides and places."""
from __future__ import annotations

import pytest

from ggraph import dtypes
from ggraph.size import Size
from ggraph.tensor import Tensor, leaf, pad4, pad_nb, strides


@pytest.mark.parametrize(("name", "nb", "nbytes"), [
    ("F32", (4, 1024, 3072, 6144), 6144), ("F16", (2, 512, 1536, 3072), 3072), ("Q8_0", (34, 272, 816, 1632), 1632),
    ("Q4_K", (144, 144, 432, 864), 864)])
def test_strides_and_bytes_of_a_contiguous_tensor(name: str, nb: tuple[int, ...], nbytes: int) -> None:
    x = leaf(dtypes.TYPES[name], (256, 3, 2), "x")
    assert x.ne == (256, 3, 2, 1) and x.nb == nb and x.nbytes == nbytes and x.numel == 1536 and x.contiguous


def test_missing_axes_are_one_and_their_strides_go_on() -> None:
    assert pad4((5,)) == (5, 1, 1, 1)
    assert pad_nb((4, 40), (5, 3, 2, 1)) == (4, 40, 120, 240)


def test_a_view_lies_in_its_root() -> None:
    root = leaf(dtypes.F32, (8, 4), "root")
    root.buffer, root.offset = "buffer", 100
    view = Tensor("view", dtypes.F32, (8, 1), (root,), view_src=root, view_offs=32)
    assert view.root is root and view.place() == ("buffer", 132) and root.place() == ("buffer", 100)


def test_a_size_in_the_shape_stays_one_in_strides_and_bytes() -> None:
    n = Size.variable("n_kv", 256)
    x = leaf(dtypes.F16, (64, n, 2), "k")
    assert x.nb == strides(dtypes.F16, x.ne) == (2, 128, 32768, 65536)
    assert isinstance(x.nb[2], Size) and isinstance(x.nbytes, Size) and x.contiguous


def test_text_names_what_it_is() -> None:
    node = Tensor("add", dtypes.F32, (4,), (leaf(dtypes.F32, (4,), "a"),), name="s")
    assert repr(node) == "s = add(a) F32[4, 1, 1, 1]"
