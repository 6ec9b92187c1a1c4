"""IQ types: groups of 8 (or 4) elements are looked up in a grid of points; super-blocks of 256.

`grids` has the tables; signs are stored beside the index. IQ4_NL is in `legacy`.
"""
from __future__ import annotations

import numpy as np

from ggraph import dtypes
from ggraph.quants.base import Array, Blocks, Quant, bits, column, split
from ggraph.quants.grids import grid
from ggraph.quants.legacy import IQ4_VALUES

# Sign bytes by 7-bit index: the index itself, and bit 7 so that the number of minuses is even (ksigns_iq2xs).
EVEN_SIGNS = np.array([i | (i.bit_count() % 2 << 7) for i in range(128)], np.uint8)
IQ1_DELTA = np.float32(0.125)


def _signs(x: Array) -> Array:
    """Bytes [...] -> int8 [..., 8] of 1 and -1, where a set bit is a minus."""
    return np.int8(1) - bits(x[..., None]).view(np.int8) * np.int8(2)


def _packed_signs(aux: Array) -> Array:
    """uint32 [n, 8] with four 7-bit sign indices -> [n, 8, 4, 8]."""
    index = aux[..., None] >> np.arange(0, 28, 7, dtype=np.uint32) & np.uint32(127)
    return _signs(EVEN_SIGNS[index])


def _pairs(x: Array, k: int) -> Array:
    """[n, k/2] -> [n, k]: the low and the high half of each byte in turn."""
    return split(x, 4).swapaxes(-1, -2).reshape(-1, k)


def _index(low: Array, high: Array) -> Array:
    return low.astype(np.uint16) | (high.astype(np.uint16) << np.uint16(8))


def _scale(d: Array, s: Array, unit: float) -> Array:
    """d [n] * (0.5 + s [n, k]) * unit -> [n, k, 1]."""
    return (column(d) * (np.float32(0.5) + s.astype(np.float32)) * np.float32(unit))[..., None]


class IQ2_XXS(Quant, dtype=dtypes.IQ2_XXS, layout=[("d", "<f2"), ("groups", [("qs", "u1", 4), ("aux", "<u4")], 8)]):
    """Per 32: four grid indices, then a word of four sign indices and, on top, the scale."""

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        qs, aux = b["groups"]["qs"], b["groups"]["aux"]
        db = _scale(b["d"], aux >> np.uint32(28), 0.25)
        return db[..., None] * grid("IQ2_XXS")[qs] * _packed_signs(aux)


class IQ2_XS(Quant, dtype=dtypes.IQ2_XS, layout=[("d", "<f2"), ("qs", "<u2", 32), ("scales", "u1", 8)]):
    """Per 8: nine bits of grid index, seven of sign index."""

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        qs = b["qs"].reshape(-1, 16, 2)
        db = _scale(b["d"], _pairs(b["scales"], 16), 0.25)
        return db[..., None] * grid("IQ2_XS")[qs & np.uint16(511)] * _signs(EVEN_SIGNS[qs >> np.uint16(9)])


class IQ2_S(Quant, dtype=dtypes.IQ2_S,
            layout=[("d", "<f2"), ("qs", "u1", 32), ("signs", "u1", 32), ("qh", "u1", 8), ("scales", "u1", 8)]):
    """Per 8: ten bits of grid index (the top two in qh) and a byte of signs."""

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        high = split(b["qh"], 2).swapaxes(-1, -2).reshape(-1, 32)
        index = _index(b["qs"], high).reshape(-1, 16, 2)
        db = _scale(b["d"], _pairs(b["scales"], 16), 0.25)
        return db[..., None] * grid("IQ2_S")[index] * _signs(b["signs"].reshape(-1, 16, 2))


class IQ3_XXS(Quant, dtype=dtypes.IQ3_XXS, layout=[("d", "<f2"), ("qs", "u1", 64), ("aux", "<u4", 8)]):
    """Per 4 a grid index; per 32 a word of four sign indices and, on top, the scale."""

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        db = _scale(b["d"], b["aux"] >> np.uint32(28), 0.5)
        points = grid("IQ3_XXS")[b["qs"]].reshape(-1, 8, 4, 8)
        return db[..., None] * points * _packed_signs(b["aux"])


class IQ3_S(Quant, dtype=dtypes.IQ3_S,
            layout=[("d", "<f2"), ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)]):
    """Per 4: nine bits of grid index (the top one in qh)."""

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        points = grid("IQ3_S")[_index(b["qs"], bits(b["qh"]))].reshape(-1, 8, 4, 8)
        db = column(b["d"]) * (_pairs(b["scales"], 8) * np.uint8(2) + np.uint8(1))
        return db[..., None, None] * points * _signs(b["signs"].reshape(-1, 8, 4))


def _delta(minus: Array) -> Array:
    return np.where(minus, -IQ1_DELTA, IQ1_DELTA)


class IQ1_S(Quant, dtype=dtypes.IQ1_S, layout=[("d", "<f2"), ("qs", "u1", 32), ("qh", "<u2", 8)]):
    """Per 32 a word: four times the top three bits of a grid index, three bits of scale, the sign of the delta."""

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        qh = b["qh"]
        dl = column(b["d"]) * ((qh >> np.uint16(12) & np.uint16(7)) * np.uint16(2) + np.uint16(1))
        high = qh[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & np.uint16(7)
        points = grid("IQ1_S")[_index(b["qs"], high.reshape(-1, 32))].reshape(-1, 8, 32)
        return dl[..., None] * (points + _delta(qh >> np.uint16(15))[..., None])


class IQ1_M(Quant, dtype=dtypes.IQ1_M, layout=[("qs", "u1", 32), ("qh", "u1", 16), ("scales", "<u2", 4)]):
    """Per 8 a nibble of qh: the top three bits of the grid index and the sign of the delta. Per 16 a three-bit scale.

    The top nibbles of the four scale words make the half-precision d.
    """

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        words = b["scales"]
        nibbles = words >> np.uint16(12) << np.arange(0, 16, 4, dtype=np.uint16)
        d = np.bitwise_or.reduce(nibbles, axis=-1).view(np.float16)
        scales = words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & np.uint16(7)
        dl = column(d) * (scales.reshape(-1, 16) * np.uint16(2) + np.uint16(1))
        qh = _pairs(b["qh"], 32)
        points = grid("IQ1_S")[_index(b["qs"], qh & np.uint8(7))] + _delta(qh >> np.uint8(3))[..., None]
        return dl[..., None] * points.reshape(-1, 16, 16)


class IQ4_XS(Quant, dtype=dtypes.IQ4_XS,
             layout=[("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", (8, 16))]):
    """Eight IQ4_NL groups with six-bit scales, four bits in scales_l and two in scales_h."""

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        high = b["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
        scales = (_pairs(b["scales_l"], 8) | high.astype(np.uint8) << 4).view(np.int8) - np.int8(32)
        return (column(b["d"]) * scales)[..., None] * IQ4_VALUES[split(b["qs"], 4).reshape(-1, 8, 32)]
