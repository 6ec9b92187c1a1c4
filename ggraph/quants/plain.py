"""Unquantized types: blocks of one element. NumPy converts all but BF16, floats to nearest even."""
from __future__ import annotations

import numpy as np

from ggraph import dtypes
from ggraph.quants.base import Array, Blocks, Quant


class F32(Quant, dtype=dtypes.F32, layout=[("x", "<f4")]):
    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        return b["x"].astype(np.float32)

    @classmethod
    def pack(cls, x: Array) -> Blocks:
        return x.astype(cls.layout["x"]).view(cls.layout)


class F16(F32, dtype=dtypes.F16, layout=[("x", "<f2")]):
    pass


class BF16(Quant, dtype=dtypes.BF16, layout=[("x", "<u2")]):
    """The upper half of a float32."""

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        return (b["x"].astype(np.uint32) << np.uint32(16)).view(np.float32)

    @classmethod
    def pack(cls, x: Array) -> Blocks:
        u = np.ascontiguousarray(x).view(np.uint32)
        even = (u >> np.uint32(16)) & np.uint32(1)
        quiet = (u >> np.uint32(16)) | np.uint32(64)    # or a NaN with its payload in the lower half would become inf
        half = np.where(np.isnan(x), quiet, (u + np.uint32(0x7FFF) + even) >> np.uint32(16))
        return half.astype("<u2").view(cls.layout)


class F64(Quant, dtype=dtypes.F64, layout=[("x", "<f8")]):
    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        return b["x"].astype(np.float32)


class I8(F64, dtype=dtypes.I8, layout=[("x", "<i1")]):
    pass


class I16(F64, dtype=dtypes.I16, layout=[("x", "<i2")]):
    pass


class I32(F64, dtype=dtypes.I32, layout=[("x", "<i4")]):
    pass


class I64(F64, dtype=dtypes.I64, layout=[("x", "<i8")]):
    pass
