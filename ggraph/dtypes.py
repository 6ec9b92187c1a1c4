"""One row per GGML tensor type: name, id, elements per block, bytes per block.

Names and ids are ggml's (`enum ggml_type`). Shapes everywhere are in ggml order, contiguous axis first.
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np


class DType(NamedTuple):
    """`block` elements are stored in `nbytes` bytes; `np` is the NumPy type of plain (one-element) types."""
    name: str
    id: int
    block: int
    nbytes: int
    np: type | None = None

    @property
    def quantized(self) -> bool:
        return self.block > 1

    @property
    def plain(self) -> bool:
        """NumPy has this type (bf16 is not plain: NumPy lacks it)."""
        return self.np is not None

    def row_bytes(self, n: int) -> int:
        """Bytes of a contiguous row of `n` elements; `n` must be a multiple of `block`."""
        return n // self.block * self.nbytes

    def __repr__(self) -> str:
        return self.name


F32 = DType("F32", 0, 1, 4, np.float32)
F16 = DType("F16", 1, 1, 2, np.float16)
Q4_0 = DType("Q4_0", 2, 32, 18)
Q4_1 = DType("Q4_1", 3, 32, 20)
Q5_0 = DType("Q5_0", 6, 32, 22)
Q5_1 = DType("Q5_1", 7, 32, 24)
Q8_0 = DType("Q8_0", 8, 32, 34)
Q8_1 = DType("Q8_1", 9, 32, 36)
Q2_K = DType("Q2_K", 10, 256, 84)
Q3_K = DType("Q3_K", 11, 256, 110)
Q4_K = DType("Q4_K", 12, 256, 144)
Q5_K = DType("Q5_K", 13, 256, 176)
Q6_K = DType("Q6_K", 14, 256, 210)
Q8_K = DType("Q8_K", 15, 256, 292)
IQ2_XXS = DType("IQ2_XXS", 16, 256, 66)
IQ2_XS = DType("IQ2_XS", 17, 256, 74)
IQ3_XXS = DType("IQ3_XXS", 18, 256, 98)
IQ1_S = DType("IQ1_S", 19, 256, 50)
IQ4_NL = DType("IQ4_NL", 20, 32, 18)
IQ3_S = DType("IQ3_S", 21, 256, 110)
IQ2_S = DType("IQ2_S", 22, 256, 82)
IQ4_XS = DType("IQ4_XS", 23, 256, 136)
I8 = DType("I8", 24, 1, 1, np.int8)
I16 = DType("I16", 25, 1, 2, np.int16)
I32 = DType("I32", 26, 1, 4, np.int32)
I64 = DType("I64", 27, 1, 8, np.int64)
F64 = DType("F64", 28, 1, 8, np.float64)
IQ1_M = DType("IQ1_M", 29, 256, 56)
BF16 = DType("BF16", 30, 1, 2)
TQ1_0 = DType("TQ1_0", 34, 256, 54)
TQ2_0 = DType("TQ2_0", 35, 256, 66)
MXFP4 = DType("MXFP4", 39, 32, 17)
NVFP4 = DType("NVFP4", 40, 64, 36)
Q1_0 = DType("Q1_0", 41, 128, 18)
Q2_0 = DType("Q2_0", 42, 64, 18)

TYPES: dict[str, DType] = {t.name: t for t in list(globals().values()) if isinstance(t, DType)}
BY_ID: dict[int, DType] = {t.id: t for t in TYPES.values()}


def parse(name: str | DType) -> DType:
    """The type called `name`, in any case ("q8_0", "F16"). ValueError names the known ones."""
    if isinstance(name, DType):
        return name
    try:
        return TYPES[name.upper()]
    except (KeyError, AttributeError):
        raise ValueError(f"unknown type {name!r}; known types: {', '.join(TYPES)}") from None
