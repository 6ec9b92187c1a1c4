"""IQ types: groups of 8 (or 4) elements are looked up in a grid of points; super-blocks of 256.

`grids` has the tables; signs are stored beside the index. IQ4_NL is in `legacy`.
"""
from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ggraph import dtypes
from ggraph.quants.base import Array, Blocks, Quant, bits, code, column, join, own_weights, refit, split
from ggraph.quants.grids import grid
from ggraph.quants.legacy import IQ4_VALUES, nearest_iq4

# Sign bytes by 7-bit index: the index itself, and bit 7 so that the number of minuses is even (ksigns_iq2xs).
EVEN_SIGNS = np.array([i | (i.bit_count() % 2 << 7) for i in range(128)], np.uint8)
IQ1_DELTA = np.float32(0.125)
# What the largest value of a group may become, while scales are tried.
IQ1_RATIOS = np.linspace(0.9, 3.5, 16, dtype=np.float32)
IQ2_RATIOS = np.linspace(32, 64, 17, dtype=np.float32)
IQ3_RATIOS = np.linspace(12, 19, 15, dtype=np.float32)


def _signs(x: Array) -> Array:
    """Bytes [...] -> int8 [..., 8] of 1 and -1, where a set bit is a minus."""
    return np.int8(1) - bits(x[..., None]).view(np.int8) * np.int8(2)


def _packed_signs(aux: Array) -> Array:
    """uint32 [n, 8] with four 7-bit sign indices -> [n, 8, 4, 8]."""
    index = aux[..., None] >> np.arange(0, 28, 7, dtype=np.uint32) & np.uint32(127)
    return _signs(EVEN_SIGNS[index])


def _join_signs(signs: Array, s: Array) -> Array:
    """The words of `_packed_signs`: sign bytes [n, 32], and on top the scales [n, 8]."""
    index = (signs & 127).astype(np.uint32).reshape(-1, 8, 4) << np.arange(0, 28, 7, dtype=np.uint32)
    return np.bitwise_or.reduce(index, axis=-1) | s.astype(np.uint32) << np.uint32(28)


def _pairs(x: Array, k: int) -> Array:
    """[n, k/2] -> [n, k]: the low and the high half of each byte in turn."""
    return split(x, 4).swapaxes(-1, -2).reshape(-1, k)


def _index(low: Array, high: Array) -> Array:
    return low.astype(np.uint16) | (high.astype(np.uint16) << np.uint16(8))


def _scale(d: Array, s: Array, unit: float) -> Array:
    """d [n] * (0.5 + s [n, k]) * unit -> [n, k, 1]."""
    return (column(d) * (np.float32(0.5) + s.astype(np.float32)) * np.float32(unit))[..., None]


class Net(NamedTuple):
    """What `search.grid` asks about a grid: points [p, k], and for each place on the lattice of its levels the points near it."""
    points: Array
    near: Array
    level: Array


@cache
def _net(name: str, n_near: int = 24) -> Net:
    points = grid(name).astype(np.float32)
    values = np.unique(points)
    k, levels = points.shape[1], len(values)
    first, step = values[0], (values[-1] - values[0]) / (levels - 1)
    digits = np.arange(levels ** k)[:, None] // levels ** np.arange(k) % levels
    places = (first + step * digits).astype(np.float32)
    far = (places ** 2).sum(1)[:, None] + (points ** 2).sum(1) - 2 * places @ points.T
    own = (np.rint((points - first) / step) @ levels ** np.arange(k)).astype(int)
    far[own, np.arange(len(points))] = -1               # a place that is a point has that one in front, then the mark
    nearest = np.argsort(far, axis=1, kind="stable")[:, :n_near]
    near = np.empty((len(places), n_near + 1), np.int16)
    near[:, :n_near], near[:, n_near] = nearest, nearest[:, -1]
    near[own, 2:], near[own, 1] = nearest[own, 1:], -1
    return Net(points, near, np.array([first, step, levels], np.float32))


_NO_SHIFT, _NOT_GIVEN = np.zeros(1, np.float32), np.zeros(0, np.float32)


def _fit(net: Net, x: Array, w: Array, ratios: Array, shifts: Array = _NO_SHIFT, fixed: Array = _NOT_GIVEN) -> Any:
    """`search.grid` for groups [n, g, s]: scales and scores [n, g], points and shifts [n, g, s / k]."""
    from ggraph.quants import search
    n, g, s = x.shape
    found = search.grid(x.reshape(-1, s), w.reshape(-1, s), *net, shifts, ratios, fixed.reshape(-1))
    return tuple(part.reshape(n, g, *part.shape[1:]) for part in found)


def _odd_scales(scale: Array, score: Array, levels: int) -> tuple[Array, Array]:
    """(d [n, 1], s [n, g] of 0 .. levels - 1) so that d * (2 * s + 1) is near to the scales, the weightier ones above all."""
    w = np.where(scale > 0, score / np.maximum(scale * scale, np.float32(1e-38)), 0)
    most = scale.max(axis=-1, keepdims=True)
    best, best_d = np.full(most.shape, np.inf, np.float32), np.zeros_like(most)
    for t in range(-10, 11):
        d = most / np.float32(2 * levels - 1 + 0.3 * t)
        for _ in range(2):
            odd = (2 * code(scale - d, 2 * d, 0, levels - 1) + 1).astype(np.float32)
            down = (w * odd * odd).sum(axis=-1, keepdims=True)
            d = np.where(down > 0, (w * odd * scale).sum(axis=-1, keepdims=True) / down, 0).astype(np.float32)
        error = (w * (scale - d * odd) ** 2).sum(axis=-1, keepdims=True)
        better = error < best
        best, best_d = np.where(better, error, best), np.where(better, d, best_d)
    return best_d, code(scale - best_d, 2 * best_d, 0, levels - 1)


def _apart(x: Array, w: Array, even: bool) -> tuple[Array, Array]:
    """(values without their signs, sign bytes [n, 32]). `even`: the number of minuses in 8 must be even, so where it is not, the
    value that matters least keeps the wrong sign."""
    eights, minus = x.reshape(-1, 8), x.reshape(-1, 8) < 0
    if even:
        least = (w.reshape(-1, 8) * eights * eights).argmin(axis=-1)
        rows = np.flatnonzero(minus.sum(axis=-1) % 2)
        minus[rows, least[rows]] ^= True
    return np.where(minus, -eights, eights).reshape(x.shape), np.packbits(minus, axis=-1, bitorder="little").reshape(-1, 32)


def _fit_unsigned(net: Net, x: Array, w: Array, ratios: Array, unit: float, even: bool) -> Any:
    """Scales s [n, g] of 0 .. 15, points [n, g, s / k] and sign bytes [n, 32]; a scale means d * (2 * s + 1) * unit."""
    x, signs = _apart(x, w, even)
    scale, score, _, _ = _fit(net, x, w, ratios)
    d, s = _odd_scales(scale / np.float32(unit), score, 16)
    fixed = (d * (2 * s + 1)).astype(np.float32) * np.float32(unit)
    return s, _fit(net, x, w, ratios, fixed=fixed)[2], signs


def _close(cls: type[Quant], b: Blocks, x: Array, w: Array) -> Blocks:
    """With the d that fits best, all else given."""
    b["d"] = 1
    b["d"] = refit(cls.unpack(b).reshape(len(b), -1).astype(np.float32), x.reshape(len(b), -1), w.reshape(len(b), -1))
    return b


def _join_pairs(q: Array) -> Array:
    """[n, k] -> [n, k / 2]: what `_pairs` takes apart."""
    return join(q.reshape(len(q), -1, 2).swapaxes(-1, -2), 4)


class IQ2_XXS(Quant, dtype=dtypes.IQ2_XXS, layout=[("d", "<f2"), ("groups", [("qs", "u1", 4), ("aux", "<u4")], 8)]):
    """Per 32: four grid indices, then a word of four sign indices and, on top, the scale."""
    spread = 1.0

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        qs, aux = b["groups"]["qs"], b["groups"]["aux"]
        db = _scale(b["d"], aux >> np.uint32(28), 0.25)
        return db[..., None] * grid("IQ2_XXS")[qs] * _packed_signs(aux)

    @classmethod
    def quantize(cls, x: Array, w: Array | None = None) -> Blocks:
        b = np.empty(len(x), cls.layout)
        x = x.reshape(-1, 8, 32)
        w = own_weights(x) if w is None else w.reshape(x.shape)
        s, index, signs = _fit_unsigned(_net("IQ2_XXS"), x, w, IQ2_RATIOS, 1 / 8, even=True)
        b["groups"]["qs"], b["groups"]["aux"] = index, _join_signs(signs, s)
        return _close(cls, b, x, w)


class IQ2_XS(Quant, dtype=dtypes.IQ2_XS, layout=[("d", "<f2"), ("qs", "<u2", 32), ("scales", "u1", 8)]):
    """Per 8: nine bits of grid index, seven of sign index."""
    spread = 1.0

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        qs = b["qs"].reshape(-1, 16, 2)
        db = _scale(b["d"], _pairs(b["scales"], 16), 0.25)
        return db[..., None] * grid("IQ2_XS")[qs & np.uint16(511)] * _signs(EVEN_SIGNS[qs >> np.uint16(9)])

    @classmethod
    def quantize(cls, x: Array, w: Array | None = None) -> Blocks:
        b = np.empty(len(x), cls.layout)
        x = x.reshape(-1, 16, 16)
        w = own_weights(x) if w is None else w.reshape(x.shape)
        s, index, signs = _fit_unsigned(_net("IQ2_XS"), x, w, IQ2_RATIOS, 1 / 8, even=True)
        b["qs"], b["scales"] = index.reshape(-1, 32) | (signs & 127).astype(np.int32) << 9, _join_pairs(s)
        return _close(cls, b, x, w)


class IQ2_S(Quant, dtype=dtypes.IQ2_S,
            layout=[("d", "<f2"), ("qs", "u1", 32), ("signs", "u1", 32), ("qh", "u1", 8), ("scales", "u1", 8)]):
    """Per 8: ten bits of grid index (the top two in qh) and a byte of signs."""
    spread = 2.0

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        high = split(b["qh"], 2).swapaxes(-1, -2).reshape(-1, 32)
        index = _index(b["qs"], high).reshape(-1, 16, 2)
        db = _scale(b["d"], _pairs(b["scales"], 16), 0.25)
        return db[..., None] * grid("IQ2_S")[index] * _signs(b["signs"].reshape(-1, 16, 2))

    @classmethod
    def quantize(cls, x: Array, w: Array | None = None) -> Blocks:
        b = np.empty(len(x), cls.layout)
        x = x.reshape(-1, 16, 16)
        w = own_weights(x) if w is None else w.reshape(x.shape)
        s, index, b["signs"] = _fit_unsigned(_net("IQ2_S"), x, w, IQ2_RATIOS, 1 / 8, even=False)
        index = index.reshape(-1, 32)
        b["qs"], b["qh"] = index & 255, join((index >> 8).reshape(-1, 8, 4).swapaxes(-1, -2), 2)
        b["scales"] = _join_pairs(s)
        return _close(cls, b, x, w)


class IQ3_XXS(Quant, dtype=dtypes.IQ3_XXS, layout=[("d", "<f2"), ("qs", "u1", 64), ("aux", "<u4", 8)]):
    """Per 4 a grid index; per 32 a word of four sign indices and, on top, the scale."""
    spread = 2.0

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        db = _scale(b["d"], b["aux"] >> np.uint32(28), 0.5)
        points = grid("IQ3_XXS")[b["qs"]].reshape(-1, 8, 4, 8)
        return db[..., None] * points * _packed_signs(b["aux"])

    @classmethod
    def quantize(cls, x: Array, w: Array | None = None) -> Blocks:
        b = np.empty(len(x), cls.layout)
        x = x.reshape(-1, 8, 32)
        w = own_weights(x) if w is None else w.reshape(x.shape)
        s, index, signs = _fit_unsigned(_net("IQ3_XXS"), x, w, 4 * IQ3_RATIOS, 1 / 4, even=True)
        b["qs"], b["aux"] = index.reshape(-1, 64), _join_signs(signs, s)
        return _close(cls, b, x, w)


class IQ3_S(Quant, dtype=dtypes.IQ3_S,
            layout=[("d", "<f2"), ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)]):
    """Per 4: nine bits of grid index (the top one in qh)."""
    spread = 2.0

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        points = grid("IQ3_S")[_index(b["qs"], bits(b["qh"]))].reshape(-1, 8, 4, 8)
        db = column(b["d"]) * (_pairs(b["scales"], 8) * np.uint8(2) + np.uint8(1))
        return db[..., None, None] * points * _signs(b["signs"].reshape(-1, 8, 4))

    @classmethod
    def quantize(cls, x: Array, w: Array | None = None) -> Blocks:
        b = np.empty(len(x), cls.layout)
        x = x.reshape(-1, 8, 32)
        w = own_weights(x) if w is None else w.reshape(x.shape)
        s, index, b["signs"] = _fit_unsigned(_net("IQ3_S"), x, w, IQ3_RATIOS, 1, even=False)
        index = index.reshape(-1, 64)
        b["qs"], b["scales"] = index & 255, _join_pairs(s)
        b["qh"] = np.packbits((index >> 8).astype(np.uint8), axis=-1, bitorder="little")
        return _close(cls, b, x, w)


def _delta(minus: Array) -> Array:
    return np.where(minus, -IQ1_DELTA, IQ1_DELTA)


class IQ1_S(Quant, dtype=dtypes.IQ1_S, layout=[("d", "<f2"), ("qs", "u1", 32), ("qh", "<u2", 8)]):
    """Per 32 a word: four times the top three bits of a grid index, three bits of scale, the sign of the delta."""
    spread = 2.0

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        qh = b["qh"]
        dl = column(b["d"]) * ((qh >> np.uint16(12) & np.uint16(7)) * np.uint16(2) + np.uint16(1))
        high = qh[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & np.uint16(7)
        points = grid("IQ1_S")[_index(b["qs"], high.reshape(-1, 32))].reshape(-1, 8, 32)
        return dl[..., None] * (points + _delta(qh >> np.uint16(15))[..., None])

    @classmethod
    def quantize(cls, x: Array, w: Array | None = None) -> Blocks:
        b = np.empty(len(x), cls.layout)
        x = x.reshape(-1, 8, 32)
        w = own_weights(x) if w is None else w.reshape(x.shape)
        net, shifts = _net("IQ1_S"), [np.array([delta], np.float32) for delta in (IQ1_DELTA, -IQ1_DELTA)]
        plus, minus = (_fit(net, x, w, IQ1_RATIOS, shift) for shift in shifts)
        down = minus[1] > plus[1]
        scale, score = (np.where(down, m, p) for m, p in zip(minus[:2], plus[:2]))
        d, s = _odd_scales(scale, score, 8)
        fixed = (d * (2 * s + 1)).astype(np.float32)
        plus, minus = (_fit(net, x, w, IQ1_RATIOS, shift, fixed) for shift in shifts)
        index = np.where(down[..., None], minus[2], plus[2])
        b["qs"] = (index & 255).reshape(-1, 32)
        b["qh"] = np.bitwise_or.reduce(index >> 8 << np.arange(0, 12, 3), axis=-1) | s << 12 | down.astype(np.int32) << 15
        return _close(cls, b, x, w)


class IQ1_M(Quant, dtype=dtypes.IQ1_M, layout=[("qs", "u1", 32), ("qh", "u1", 16), ("scales", "<u2", 4)]):
    """Per 8 a nibble of qh: the top three bits of the grid index and the sign of the delta. Per 16 a three-bit scale.

    The top nibbles of the four scale words make the half-precision d.
    """
    spread = 2.0

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

    @classmethod
    def quantize(cls, x: Array, w: Array | None = None) -> Blocks:
        b = np.empty(len(x), cls.layout)
        x = x.reshape(-1, 16, 16)
        w = own_weights(x) if w is None else w.reshape(x.shape)
        net, shifts = _net("IQ1_S"), np.array([IQ1_DELTA, -IQ1_DELTA], np.float32)
        scale, score, _, _ = _fit(net, x, w, IQ1_RATIOS, shifts)
        d, s = _odd_scales(scale, score, 8)
        _, _, index, down = _fit(net, x, w, IQ1_RATIOS, shifts, (d * (2 * s + 1)).astype(np.float32))
        index = index.reshape(-1, 32)
        b["qs"], b["qh"] = index & 255, _join_pairs(index >> 8 | down.reshape(-1, 32).astype(np.int32) << 3)
        low = np.bitwise_or.reduce(s.reshape(-1, 4, 4) << np.arange(0, 12, 3), axis=-1)
        cls._put_d(b, low, np.ones(len(b), np.float32))
        y = cls.unpack(b).reshape(len(b), -1).astype(np.float32)
        cls._put_d(b, low, refit(y, x.reshape(y.shape), w.reshape(y.shape)))
        return b

    @classmethod
    def _put_d(cls, b: Blocks, low: Array, d: Array) -> None:
        nibbles = d.astype(np.float16).view(np.uint16)[:, None] >> np.arange(0, 16, 4, dtype=np.uint16) & np.uint16(15)
        b["scales"] = low | nibbles.astype(np.int32) << 12


class IQ4_XS(Quant, dtype=dtypes.IQ4_XS,
             layout=[("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", (8, 16))]):
    """Eight IQ4_NL groups with six-bit scales, four bits in scales_l and two in scales_h."""
    spread = 2.0

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        high = b["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
        scales = (_pairs(b["scales_l"], 8) | high.astype(np.uint8) << 4).view(np.int8) - np.int8(32)
        return (column(b["d"]) * scales)[..., None] * IQ4_VALUES[split(b["qs"], 4).reshape(-1, 8, 32)]

    @classmethod
    def quantize(cls, x: Array, w: Array | None = None) -> Blocks:
        from ggraph.quants import search
        b = np.empty(len(x), cls.layout)
        x = x.reshape(-1, 8, 32)
        w = own_weights(x) if w is None else w.reshape(x.shape)
        found = search.table(x.reshape(-1, 32), w.reshape(-1, 32), IQ4_VALUES.astype(np.float32), 7).reshape(-1, 8)
        d = search.codes(found, w.sum(axis=-1), -32, 31, 9, 0.1)[:, None]
        s = code(found, d, -32, 31)
        scale = (d * s)[..., None]
        q = nearest_iq4(x * np.where(scale == 0, np.float32(0), np.float32(1) / scale))
        s = s + 32
        b["qs"] = join(q.reshape(-1, 8, 2, 16), 4)
        b["scales_l"], b["scales_h"] = _join_pairs(s & 15), np.bitwise_or.reduce(s >> 4 << np.arange(0, 16, 2), axis=-1)
        return _close(cls, b, x, w)
