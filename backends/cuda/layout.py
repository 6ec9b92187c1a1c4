"""What lowerings ask of tensors, and the usual grids."""
from __future__ import annotations

from ggraph import dtypes
from ggraph.tensor import Tensor

from .lower import Blocks

PLAIN = (dtypes.F32, dtypes.F16, dtypes.BF16)
PACKED = (dtypes.Q8_0, dtypes.Q4_0, dtypes.Q4_1, dtypes.Q5_0, dtypes.Q5_1, dtypes.IQ4_NL)


def f32(*tensors: Tensor | None) -> bool:
    return all(t is None or t.type is dtypes.F32 for t in tensors)


def plain(*tensors: Tensor) -> bool:
    return all(t.type in PLAIN for t in tensors)


def in_rows(*tensors: Tensor) -> bool:
    """The elements (or blocks) of each row lie side by side."""
    return all(t.nb[0] == t.type.nbytes for t in tensors)


def same(a: Tensor, b: Tensor) -> bool:
    return a.ne == b.ne


def rows(x: Tensor) -> tuple[Blocks]:
    """A block for each row."""
    return (Blocks(x.ne[1] * x.ne[2] * x.ne[3]),)


def elements(x: Tensor, each: int = 256) -> tuple[Blocks]:
    """A thread for each element."""
    return (Blocks(x.numel, each),)


def threads(n: int) -> int:
    """Of a block that takes a row of n elements, about four each."""
    return min(1024, max(32, -(-int(n) // 128) * 32))


def bits(x: Tensor) -> int:
    """The number by which a kernel that only moves elements knows a type: 32-bit integers move as floats do."""
    return dtypes.F32.id if x.type is dtypes.I32 else x.type.id
