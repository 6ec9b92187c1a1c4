"""K-quants: super-blocks of 256 whose 16 or 8 groups have small integer scales (and mins) of their own."""
from __future__ import annotations

import numpy as np

from ggraph import dtypes
from ggraph.quants.base import Array, Blocks, Quant, column, extreme, split

_4K = [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12)]


def _two_bits(qs: Array) -> Array:
    """[n, 64] -> [n, 16, 16]: each 32 bytes hold four runs of 32, one per bit pair."""
    return split(qs.reshape(-1, 2, 32), 2).reshape(-1, 16, 16)


def _four_bits(qs: Array) -> Array:
    """[n, 128] -> [n, 8, 32]: each 32 bytes hold a run of 32 in their low halves, the next in their high halves."""
    return split(qs.reshape(-1, 4, 32), 4).reshape(-1, 8, 32)


def _scales_mins(packed: Array) -> tuple[Array, Array]:
    """[n, 12] -> scales, mins [n, 8] of six bits: groups 0 to 3 lie in bytes 0 to 3 and 4 to 7.

    Groups 4 to 7 have their low four bits in bytes 8 to 11 and their top two in the top bits of bytes 0 to 7.
    """
    s, m, low = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([s & 63, (low & 15) | (s >> 6 << 4)], axis=-1)
    mins = np.concatenate([m & 63, (low >> 4) | (m >> 6 << 4)], axis=-1)
    return scales, mins


class Q2_K(Quant, dtype=dtypes.Q2_K, layout=[("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")]):
    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        dl = column(b["d"]) * (b["scales"] & 15)
        ml = column(b["dmin"]) * (b["scales"] >> 4)
        return dl[..., None] * _two_bits(b["qs"]) - ml[..., None]


class Q3_K(Quant, dtype=dtypes.Q3_K,
           layout=[("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")]):
    """Three bits: two in qs, and a hmask bit that says "do not subtract 4"."""

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        low = split(b["scales"][:, :8], 4).reshape(-1, 16)
        high = split(b["scales"][:, 8:], 2).reshape(-1, 16)
        scales = (low | (high << 4)).view(np.int8) - np.int8(32)
        q = _two_bits(b["qs"]) | (split(b["hmask"], 1).reshape(-1, 16, 16) << 2)
        return (column(b["d"]) * scales)[..., None] * (q.view(np.int8) - np.int8(4))


class Q4_K(Quant, dtype=dtypes.Q4_K, layout=[*_4K, ("qs", "u1", 128)]):
    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        scales, mins = _scales_mins(b["scales"])
        d, m = column(b["d"]) * scales, column(b["dmin"]) * mins
        return d[..., None] * _four_bits(b["qs"]) - m[..., None]


class Q5_K(Quant, dtype=dtypes.Q5_K, layout=[*_4K, ("qh", "u1", 32), ("qs", "u1", 128)]):
    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        scales, mins = _scales_mins(b["scales"])
        d, m = column(b["d"]) * scales, column(b["dmin"]) * mins
        return d[..., None] * (_four_bits(b["qs"]) | (split(b["qh"], 1) << 4)) - m[..., None]


class Q6_K(Quant, dtype=dtypes.Q6_K,
           layout=[("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")]):
    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        low = split(b["ql"].reshape(-1, 2, 64), 4).reshape(-1, 16, 16)
        q = (low | (_two_bits(b["qh"]) << 4)).view(np.int8) - np.int8(32)
        return (column(b["d"]) * b["scales"])[..., None] * q


class Q8_K(Quant, dtype=dtypes.Q8_K, layout=[("d", "<f4"), ("qs", "i1", 256), ("bsums", "<i2", 16)]):
    """Activations inside ggml; `bsums` are the sums of each 16, a convenience of its dot products."""

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        return column(b["d"]) * b["qs"]

    @classmethod
    def pack(cls, x: Array) -> Blocks:
        b = np.empty(len(x), cls.layout)
        inverse = np.float32(-127) / extreme(x)
        q = np.rint(inverse * x)
        q = np.where(np.isfinite(q), q, 0)
        b["d"], b["qs"], b["bsums"] = 1 / inverse[:, 0] + 0, q, q.reshape(-1, 16, 16).sum(axis=-1)     # no -0.0
        return b
