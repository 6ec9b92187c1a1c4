"""A node of the compute graph: an op, its shape and strides, its sources; no data and no maths.

Shapes (`ne`, elements) and strides (`nb`, bytes) have four axes, the contiguous one first, as in ggml. They may hold
`Size`s. Where a node's bytes live is decided later: `buffer` and `offset` are set by the scheduler, for weights and
caches by their owner. A view has no bytes of its own: `view_src` is its root and `view_offs` the byte offset in it.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import dtypes
from .dtypes import DType

Ne = tuple[int, int, int, int]
NO_PARAMS: dict[str, Any] = {}          # of most nodes; nobody changes a node's parameters


class Tensor:
    __slots__ = ("buffer", "name", "nb", "ne", "offset", "op", "params", "src", "type", "view_offs", "view_src")

    def __init__(self, op: str, type: DType, ne: Sequence[int], src: tuple[Tensor | None, ...] = (),
                 params: dict[str, Any] | None = None, nb: Sequence[int] | None = None,
                 view_src: Tensor | None = None, view_offs: int = 0, name: str = ""):
        self.op, self.type, self.params, self.name = op, type, params or NO_PARAMS, name
        self.src: tuple[Any, ...] = src         # Tensors, or None for an operand that is not there
        self.ne: Ne = ne if isinstance(ne, tuple) and len(ne) == 4 else pad4(ne)          # there are many of them
        self.nb: Ne = strides(type, self.ne) if nb is None else pad_nb(nb, self.ne)
        self.view_src, self.view_offs = view_src, view_offs
        self.buffer: Any = None
        self.offset: int = 0

    @property
    def numel(self) -> int:
        n = self.ne
        return n[0] * n[1] * n[2] * n[3]

    @property
    def nbytes(self) -> int:
        """Bytes of a contiguous tensor of this shape."""
        return self.type.row_bytes(self.ne[0]) * (self.ne[1] * self.ne[2] * self.ne[3])

    @property
    def contiguous(self) -> bool:
        return self.nb == strides(self.type, self.ne)

    @property
    def root(self) -> Tensor:
        """The tensor that owns the bytes."""
        return self.view_src or self

    def place(self) -> tuple[Any, int]:
        """(buffer, byte offset in it)."""
        root = self.root
        return root.buffer, root.offset + self.view_offs

    def __repr__(self) -> str:
        shape = ", ".join(str(n) for n in self.ne)
        return f"{self.name or '?'} = {self.op}({', '.join(s.name or s.op for s in self.src if s)}) {self.type}[{shape}]"


def pad4(ne: Sequence[int]) -> Ne:
    a, b, c, d = (*ne, *(1,) * (4 - len(ne)))
    return a, b, c, d


def pad_nb(nb: Sequence[int], ne: Ne) -> Ne:
    """Strides of missing axes continue the last given one."""
    out = list(nb)
    while len(out) < 4:
        out.append(out[-1] * ne[len(out) - 1])
    return out[0], out[1], out[2], out[3]


def strides(type: DType, ne: Ne) -> Ne:
    """Byte strides of a contiguous tensor."""
    row = ne[0] // type.block * type.nbytes
    plane = row * ne[1]
    return type.nbytes, row, plane, plane * ne[2]


def leaf(type: DType, ne: Sequence[int], name: str) -> Tensor:
    """A tensor that nothing computes: a weight, a cache or an input."""
    return Tensor("none", type, ne, name=name)


F32, I32 = dtypes.F32, dtypes.I32
