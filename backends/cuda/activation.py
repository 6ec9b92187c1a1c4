"""8-bit activations: who wants them, and where they are.

In: tensors that products with quantized weights read. Out: two areas of scratch memory that take turns, so that a launch may read
the activations of one tensor and write those of another. A fusion that makes a tensor may leave out its floats, where products
alone read it and follow at once.
"""
from __future__ import annotations

from typing import NamedTuple

from ggraph import dtypes
from ggraph.ops import VIEWS
from ggraph.tensor import Tensor

from ..lowering import Scratch
from .device import Kernel
from .flow import Flow
from .layout import f32, in_rows, plain
from .lower import Blocks, Emit

PARTS = 4                   # products of one launch
NOT_WEIGHTS = (dtypes.Q8_1, dtypes.Q8_K)


class Bytes(NamedTuple):
    """Where they are, and the scale and sums of each 32."""
    q: Scratch | int
    scales: Scratch | int


NOWHERE = Bytes(0, 0)


class Wish(NamedTuple):
    """How a tensor is wanted: as `floats`, as 8-bit activations (`packed`), or both."""
    floats: bool
    packed: bool


def unpackable(type: dtypes.DType) -> bool:
    return type.quantized and type not in NOT_WEIGHTS


def multiplies(node: Tensor) -> bool:
    """A product with quantized weights."""
    return node.op in ("mul_mat", "mul_mat_id") and unpackable(node.src[0].type) and in_rows(node.src[0]) and plain(node.src[1])


def content(x: Tensor) -> Tensor:
    """What the activations of x are known by: its root, where x is all of that."""
    return x.root if x.contiguous and x.view_offs == 0 and x.root.op not in ("none", *VIEWS) and x.nbytes == x.root.nbytes else x


def wish(flow: Flow, x: Tensor, group: tuple[Tensor, ...], floats: bool = False) -> Wish:
    """How the readers of x, the last result of a group of nodes, want it; `floats`: they are wanted anyway."""
    readers = flow.readers.of(x)
    usual = Wish(True, False)
    if flow.single or x.view_src is not None or x in flow.changed or not x.contiguous or not f32(x) or x.ne[0] % 32:
        return usual
    products = [r for r in flow.readers.reads.get(x, []) if multiplies(r) and content(r.src[1]) is x]
    if not products:
        return usual
    after = [n for n in flow.ahead() if n not in group][:len(products)]
    alone = readers == products == after and len(products) <= PARTS and len({id(r.src[1]) for r in products}) == 1
    return Wish(floats or not alone or (len(products) > 1 and products[0].op == "mul_mat_id"), True)


def area(emit: Emit, x: Tensor, besides: Tensor | None = None) -> Bytes:
    """Memory for the activations of x: not where those of `besides` are."""
    n = int(x.numel)
    taken = [turn for turn in (0, 1) if besides is not None and emit.holds(("activations", turn), 0, content(besides)) is not None]
    emit.turn = 1 - (taken[0] if taken else emit.turn)
    q, _ = emit.scratch(("activations", emit.turn), n, content(x))
    scales, _ = emit.scratch(("scales", emit.turn), n // 32 * 8, content(x))
    return Bytes(q, scales)


def wanted(emit: Emit, x: Tensor, how: Wish, besides: Tensor | None = None) -> Bytes:
    """Where a fusion leaves the activations of x, if they are wanted."""
    if not how.floats:
        emit.only_packed.add(x)
    return area(emit, x, besides) if how.packed else NOWHERE


def quantized(emit: Emit, x: Tensor) -> Bytes:
    """x as 8-bit activations, made unless they are there."""
    n, what = int(x.numel), content(x)
    for turn in (0, 1):
        q, scales = (emit.holds((purpose, turn), size, what) for purpose, size in (("activations", n), ("scales", n // 32 * 8)))
        if q is not None and scales is not None and what.root not in emit.flow.changed:
            return Bytes(q, scales)
    assert what not in emit.only_packed, f"the floats of {what!r} were left out"
    place = area(emit, x)
    quantize(emit, x, place)
    return place


def quantize(emit: Emit, x: Tensor, to: Bytes) -> None:
    n_rows = x.ne[1] * x.ne[2] * x.ne[3]
    emit(Kernel("activation", "quantize"), x, *to, x.type.id, grid=(Blocks(x.ne[0], 128), n_rows), block=128)
