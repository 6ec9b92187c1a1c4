"""FP4 types: codes of E2M1 (sign, two exponent bits, one mantissa bit) under a small floating-point scale."""
from __future__ import annotations

import numpy as np

from ggraph import dtypes
from ggraph.quants.base import Array, Blocks, Quant, join, split

# Twice the value of each E2M1 code, so that all are whole (kvalues_mxfp4 in ggml-common.h); scales are halved instead.
E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


def _e8m0_halved() -> Array:
    """[256]: 2**(e - 128). ggml does not treat 255 as NaN."""
    return np.ldexp(np.float32(1), np.arange(256) - 128)


def _ue4m3_halved() -> Array:
    """[256]: exponent bias 7, three mantissa bits, no sign (bit 7 is ignored); 0x7F, a NaN, counts as 0 in ggml."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, (code & 7).astype(np.float32)
    value = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(1 + mantissa / 8, exponent - 7))
    value[0x7F] = 0
    return (value / 2).astype(np.float32)


E8M0_HALVED, UE4M3_HALVED = _e8m0_halved(), _ue4m3_halved()


class MXFP4(Quant, dtype=dtypes.MXFP4, layout=[("e", "u1"), ("qs", "u1", 16)]):
    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        return E8M0_HALVED[b["e"], None] * E2M1_DOUBLED[split(b["qs"], 4).reshape(-1, 32)]

    @classmethod
    def pack(cls, x: Array) -> Blocks:
        """The exponent makes the largest magnitude 4 to 8 units; of two codes as near, the first."""
        b = np.empty(len(x), cls.layout)
        most = np.abs(x).max(axis=-1)
        exponent = np.floor(np.log2(most.astype(np.float64)).astype(np.float32)) + np.float32(125)
        b["e"] = np.where(most > 0, exponent, 0).astype(np.int32)
        near = np.abs(E8M0_HALVED[b["e"], None, None] * E2M1_DOUBLED - x[..., None])
        b["qs"] = join(near.argmin(axis=-1).reshape(-1, 2, 16), 4)
        return b


class NVFP4(Quant, dtype=dtypes.NVFP4, layout=[("d", "u1", 4), ("qs", "u1", (4, 8))]):
    """Four groups of 16, each with its scale. The per-tensor scale of such files is a tensor of its own."""

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        return UE4M3_HALVED[b["d"], None] * E2M1_DOUBLED[split(b["qs"], 4).reshape(-1, 4, 16)]
