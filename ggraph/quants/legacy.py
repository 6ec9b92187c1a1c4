"""Blocks of 32 (or more) with one scale: Q4_0 to Q8_1, IQ4_NL, and the one- and two-bit Q1_0, Q2_0."""
from __future__ import annotations

import numpy as np

from ggraph import dtypes
from ggraph.quants.base import Array, Blocks, Quant, bits, code, column, extreme, own_weights, split

# What the 16 codes of IQ4_NL and IQ4_XS stand for (format fact: kvalues_iq4nl in ggml-common.h).
IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
_FLT_MAX = np.finfo(np.float32).max
_IQ4_LEAST = np.float32(1e-15)      # ggml stores blocks below this as zero


def _halves(qs: Array) -> Array:
    """[n, 16] -> [n, 32]: element j is the low half of byte j, element j + 16 the high half."""
    return split(qs, 4).reshape(-1, 32)


def _join_halves(q: Array) -> Array:
    return (q[:, :16] & np.uint8(15)) | (q[:, 16:] << np.uint8(4))


def _codes(b: Blocks) -> Array:
    """[n, 32] codes of four bits, or of five where the block has `qh`."""
    q = _halves(b["qs"])
    return q | (bits(b["qh"]) << np.uint8(4)) if "qh" in b.dtype.names else q


def _put_codes(b: Blocks, q: Array) -> None:
    b["qs"] = _join_halves(q)
    if "qh" in b.dtype.names:
        b["qh"] = np.packbits(q >> 4, axis=-1, bitorder="little")


def _range(x: Array) -> tuple[Array, Array]:
    """(smallest, largest) [n, 1], the first of equals as in C (it decides the sign of a zero)."""
    low = np.take_along_axis(x, x.argmin(axis=-1, keepdims=True), -1)
    high = np.take_along_axis(x, x.argmax(axis=-1, keepdims=True), -1)
    return np.minimum(low, _FLT_MAX), np.maximum(high, -_FLT_MAX)       # where C starts: seen if all are infinite


def _inverse(d: Array) -> Array:
    return np.where(d == 0, np.float32(0), np.float32(1) / d)


def _code(x: Array, top: int) -> Array:
    """Truncate to 0 .. top. What is not finite becomes 0: so does C's cast on x86, where scale or value overflowed."""
    return np.minimum(np.where(np.isfinite(x), x, 0).astype(np.uint8), np.uint8(top))


def _symmetric(x: Array, half: int) -> tuple[Array, Array]:
    """(d [n, 1], codes [n, 32] of 0 .. 2 * half - 1): the element of largest magnitude gets code 0."""
    d = extreme(x) / np.float32(-half)
    return d, _code(x * _inverse(d) + np.float32(half + 0.5), 2 * half - 1)


def _affine(x: Array, top: int) -> tuple[Array, Array, Array]:
    """(d, m [n, 1], codes [n, 32] of 0 .. top) of d * code + m."""
    low, high = _range(x)
    d = (high - low) / np.float32(top)
    return d, low, _code((x - low) * _inverse(d) + np.float32(0.5), top)


def _fit_symmetric(x: Array, w: Array, half: int) -> tuple[Array, Array]:
    """As `_symmetric`, with the d (as a half-precision number) for which the weighted error is small."""
    from ggraph.quants import search
    d = search.codes(x, w, -half, half - 1, 9, 0.1)[:, None].astype(np.float16).astype(np.float32)
    return d, (code(x, d, -half, half - 1) + half).astype(np.uint8)


def _fit_affine(x: Array, w: Array, top: int) -> tuple[Array, Array, Array]:
    from ggraph.quants import search
    d, m = (v[:, None].astype(np.float16).astype(np.float32) for v in search.affine(x, w, top, 36, -0.9, 0.05))
    return d, -m, code(x + m, d, 0, top).astype(np.uint8)


class Q4_0(Quant, dtype=dtypes.Q4_0, layout=[("d", "<f2"), ("qs", "u1", 16)]):
    """d * (code - half)"""
    spread = 1.0
    half = 8

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        return column(b["d"]) * (_codes(b).view(np.int8) - np.int8(cls.half))

    @classmethod
    def pack(cls, x: Array) -> Blocks:
        return cls._blocks(*_symmetric(x, cls.half))

    @classmethod
    def quantize(cls, x: Array, w: Array | None = None) -> Blocks:
        return cls.pack(x) if w is None else cls._blocks(*_fit_symmetric(x, w, cls.half))

    @classmethod
    def _blocks(cls, d: Array, q: Array) -> Blocks:
        b = np.empty(len(d), cls.layout)
        b["d"] = d[:, 0]
        _put_codes(b, q)
        return b


class Q5_0(Q4_0, dtype=dtypes.Q5_0, layout=[("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)]):
    half = 16


class Q4_1(Quant, dtype=dtypes.Q4_1, layout=[("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)]):
    """d * code + m"""
    spread = 1.0
    top = 15

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        return column(b["d"]) * _codes(b) + column(b["m"])

    @classmethod
    def pack(cls, x: Array) -> Blocks:
        return cls._blocks(*_affine(x, cls.top))

    @classmethod
    def quantize(cls, x: Array, w: Array | None = None) -> Blocks:
        return cls.pack(x) if w is None else cls._blocks(*_fit_affine(x, w, cls.top))

    @classmethod
    def _blocks(cls, d: Array, m: Array, q: Array) -> Blocks:
        b = np.empty(len(d), cls.layout)
        b["d"], b["m"] = d[:, 0], m[:, 0]
        _put_codes(b, q)
        return b


class Q5_1(Q4_1, dtype=dtypes.Q5_1, layout=[("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)]):
    top = 31


def _eight_bits(x: Array) -> tuple[Array, Array]:
    """(d [n, 1], codes [n, 32] of -127 .. 127): the largest magnitude gets code 127."""
    d = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
    q = x * _inverse(d)
    whole = np.trunc(q)
    rounded = whole + np.trunc((q - whole) * np.float32(2))     # roundf: halves away from zero
    return d, np.where(np.isfinite(rounded), rounded, 0)


class Q8_0(Quant, dtype=dtypes.Q8_0, layout=[("d", "<f2"), ("qs", "i1", 32)]):
    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        return column(b["d"]) * b["qs"]

    @classmethod
    def pack(cls, x: Array) -> Blocks:
        b = np.empty(len(x), cls.layout)
        d, q = _eight_bits(x)
        b["d"], b["qs"] = d[:, 0], q
        return b


class Q8_1(Quant, dtype=dtypes.Q8_1, layout=[("d", "<f2"), ("s", "<f2"), ("qs", "i1", 32)]):
    """Activations inside ggml; `s` is d times the sum of qs, a convenience of its dot products."""

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        return column(b["d"]) * b["qs"]

    @classmethod
    def pack(cls, x: Array) -> Blocks:
        b = np.empty(len(x), cls.layout)
        d, q = _eight_bits(x)
        b["d"], b["s"], b["qs"] = d[:, 0], q.sum(axis=-1) * d[:, 0], q
        return b


class IQ4_NL(Quant, dtype=dtypes.IQ4_NL, layout=[("d", "<f2"), ("qs", "u1", 16)]):
    spread = 2.0

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        return column(b["d"]) * IQ4_VALUES[_halves(b["qs"])]

    @classmethod
    def pack(cls, x: Array) -> Blocks:
        """The codes come from a first scale; the scale stored is then the one that fits these codes best."""
        b = np.empty(len(x), cls.layout)
        top = extreme(x)
        first = top / np.float32(IQ4_VALUES[0])
        chosen = nearest_iq4(x * np.where(np.abs(top) < _IQ4_LEAST, np.float32(0), np.float32(1) / first))
        q, w = IQ4_VALUES[chosen].astype(np.float32), x * x
        # accumulate adds from left to right, as the C loop does; sum() would pair the terms up
        qx, q2 = (np.add.accumulate(t, axis=-1)[:, -1] for t in (w * q * x, w * q * q))
        d = np.where(q2 > 0, qx / q2, np.float32(0))
        d[np.abs(top[:, 0]) < _IQ4_LEAST] = 0
        d[np.isnan(top[:, 0])] = np.nan
        b["d"], b["qs"] = d, _join_halves(chosen)
        return b

    @classmethod
    def quantize(cls, x: Array, w: Array | None = None) -> Blocks:
        from ggraph.quants import search
        b = np.empty(len(x), cls.layout)
        b["d"] = search.table(x, own_weights(x) if w is None else w, IQ4_VALUES.astype(np.float32), 7)
        b["qs"] = _join_halves(nearest_iq4(x * _inverse(column(b["d"]))))
        return b


def nearest_iq4(x: Array) -> Array:
    """uint8 indices of the nearest of IQ4_VALUES; the upper one when both are as near."""
    values = IQ4_VALUES.astype(np.float32)
    upper = np.clip(np.searchsorted(values, x, side="right"), 1, 15)
    below = (x - values[upper - 1] < values[upper] - x) | (x <= values[0])
    return (upper - below).astype(np.uint8)


class Q1_0(Quant, dtype=dtypes.Q1_0, layout=[("d", "<f2"), ("qs", "u1", 16)]):
    """A set bit is +d, a clear one -d."""

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        return column(b["d"]) * (bits(b["qs"]).view(np.int8) * np.int8(2) - np.int8(1))


class Q2_0(Quant, dtype=dtypes.Q2_0, layout=[("d", "<f2"), ("qs", "u1", 16)]):
    """Four neighbours in a byte, codes 0 .. 3 for -1 .. 2."""

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        q = split(b["qs"], 2).swapaxes(-1, -2).reshape(-1, 64)
        return column(b["d"]) * (q.view(np.int8) - np.int8(1))
