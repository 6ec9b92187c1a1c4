"""K-quants: super-blocks of 256 whose 16 or 8 groups have small integer scales (and mins) of their own."""
from __future__ import annotations

import numpy as np

from ggraph import dtypes
from ggraph.quants.base import Array, Blocks, Quant, code, column, extreme, join, own_weights, refit, split

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


def _join_scales_mins(s: Array, m: Array) -> Array:
    """What `_scales_mins` takes apart."""
    low = (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4
    return np.concatenate([s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, low], axis=-1).astype(np.uint8)


def _half(x: Array) -> Array:
    """Rounded to what the file will hold, [n] -> float32 [n, 1]."""
    return x.astype(np.float16).astype(np.float32)[:, None]


def _fit_affine(x: Array, w: Array, top: int, steps: int, tries: tuple[int, float, float]) -> tuple[Array, ...]:
    """For d * scale * code - dmin * min, groups [n, g, s]: d, dmin [n, 1], scales, mins [n, g] up to `steps`, codes [n, g, s]."""
    from ggraph.quants import search
    n, g, s = x.shape
    found = search.affine(x.reshape(-1, s), w.reshape(-1, s), top, *tries)
    w = w / np.sqrt(np.float32(1e-30) + 2 * np.mean(x * x, axis=(1, 2), keepdims=True) + x * x)    # from here importance alone
    total = w.sum(axis=-1)
    parts, whole = [], []
    for values in (found[0].reshape(n, g), found[1].reshape(n, g)):
        d = _half(search.codes(values, total, 0, steps, 4, 0.1))
        whole.append(d)
        parts.append(code(values, d, 0, steps))
    for _ in range(2):
        bounds = np.array([0, top, 0, steps, steps], np.int32)
        search.polish(x, w, *parts, *(d[:, 0] for d in whole), bounds)
        q = _affine_codes(x, whole, parts, top)
        whole = _refit_both(x, w, whole, parts, q)
    return (*whole, *parts, _affine_codes(x, whole, parts, top))


def _affine_codes(x: Array, whole: list[Array], parts: list[Array], top: int) -> Array:
    scale, offset = ((d * part)[..., None] for d, part in zip(whole, parts))
    return code(x + offset, scale, 0, top)


def _refit_both(x: Array, w: Array, whole: list[Array], parts: list[Array], q: Array) -> list[Array]:
    """d and dmin that fit best for these scales, mins and codes; those given where they are not determined."""
    up, down = parts[0][..., None] * q.astype(np.float32), parts[1].astype(np.float32)[..., None]
    total = [(w * left * right).sum(axis=(1, 2), dtype=np.float64) for left, right in
             ((up, up), (up, down), (down, down), (x, up), (x, down))]
    uu, ud, dd, xu, xd = total
    det = uu * dd - ud * ud
    sound = det > 1e-9 * uu * dd
    d, dmin = (_half(np.where(sound, part / np.where(sound, det, 1), 0)) for part in (xu * dd - xd * ud, xu * ud - xd * uu))
    sound = (sound & (d[:, 0] > 0) & (dmin[:, 0] >= 0))[:, None]
    return [np.where(sound, new, old) for new, old in zip((d, dmin), whole)]


def _fit_signed(x: Array, w: Array, half: int, steps: int) -> tuple[Array, ...]:
    """For d * scale * code, groups [n, g, s]: d [n], scales [n, g] of -steps .. steps - 1, codes [n, g, s] of -half .. half - 1."""
    from ggraph.quants import search
    n, g, s = x.shape
    found = search.codes(x.reshape(-1, s), w.reshape(-1, s), -half, half - 1, 9, 0.1).reshape(n, g)
    d = _half(search.codes(found, w.sum(axis=-1), -steps, steps - 1, 9, 0.1))
    scales, bounds = code(found, d, -steps, steps - 1), np.array([-half, half - 1, -steps, steps - 1, 0], np.int32)
    search.polish(x, w, scales, np.zeros_like(scales), d[:, 0], np.zeros(n, np.float32), bounds)
    q = code(x, (d * scales)[..., None], -half, half - 1)
    flat = (scales[..., None] * q).reshape(n, -1).astype(np.float32)
    return refit(flat, x.reshape(n, -1), w.reshape(n, -1)), scales, q


class Q2_K(Quant, dtype=dtypes.Q2_K, layout=[("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")]):
    spread = 1.0

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        dl = column(b["d"]) * (b["scales"] & 15)
        ml = column(b["dmin"]) * (b["scales"] >> 4)
        return dl[..., None] * _two_bits(b["qs"]) - ml[..., None]

    @classmethod
    def quantize(cls, x: Array, w: Array | None = None) -> Blocks:
        b = np.empty(len(x), cls.layout)
        x = x.reshape(-1, 16, 16)
        w, tries = (np.abs(x), (15, -0.5, 0.1)) if w is None else (w.reshape(x.shape), (36, -0.9, 0.05))
        d, dmin, scales, mins, q = _fit_affine(x, w, 3, 15, tries)
        b["d"], b["dmin"], b["scales"] = d[:, 0], dmin[:, 0], scales | mins << 4
        b["qs"] = _join_two_bits(q)
        return b


def _join_two_bits(q: Array) -> Array:
    return join(q.reshape(-1, 2, 4, 32), 2).reshape(-1, 64)


def _join_four_bits(q: Array) -> Array:
    return join(q.reshape(-1, 4, 2, 32), 4).reshape(-1, 128)


class Q3_K(Quant, dtype=dtypes.Q3_K,
           layout=[("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")]):
    """Three bits: two in qs, and a hmask bit that says "do not subtract 4"."""
    spread = 2.0

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        low = split(b["scales"][:, :8], 4).reshape(-1, 16)
        high = split(b["scales"][:, 8:], 2).reshape(-1, 16)
        scales = (low | (high << 4)).view(np.int8) - np.int8(32)
        q = _two_bits(b["qs"]) | (split(b["hmask"], 1).reshape(-1, 16, 16) << 2)
        return (column(b["d"]) * scales)[..., None] * (q.view(np.int8) - np.int8(4))

    @classmethod
    def quantize(cls, x: Array, w: Array | None = None) -> Blocks:
        b = np.empty(len(x), cls.layout)
        x = x.reshape(-1, 16, 16)
        b["d"], scales, q = _fit_signed(x, own_weights(x) if w is None else w.reshape(x.shape), 4, 32)
        q, scales = q + 4, scales + 32
        b["qs"], b["hmask"] = _join_two_bits(q & 3), join((q >> 2).reshape(-1, 8, 32), 1)
        b["scales"][:, :8] = join((scales & 15).reshape(-1, 2, 8), 4)
        b["scales"][:, 8:] = join((scales >> 4).reshape(-1, 4, 4), 2)
        return b


def _with_mean(x: Array) -> Array:
    """Weights: the magnitude, and the root mean square of the group."""
    return np.abs(x) + np.sqrt(np.mean(x * x, axis=-1, keepdims=True))


class Q4_K(Quant, dtype=dtypes.Q4_K, layout=[*_4K, ("qs", "u1", 128)]):
    spread = 2.0

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        scales, mins = _scales_mins(b["scales"])
        d, m = column(b["d"]) * scales, column(b["dmin"]) * mins
        return d[..., None] * _four_bits(b["qs"]) - m[..., None]

    @classmethod
    def quantize(cls, x: Array, w: Array | None = None) -> Blocks:
        b = np.empty(len(x), cls.layout)
        x = x.reshape(-1, 8, 32)
        w, tries = (_with_mean(x), (20, -1.0, 0.1)) if w is None else (w.reshape(x.shape), (36, -0.9, 0.05))
        d, dmin, scales, mins, q = _fit_affine(x, w, 15, 63, tries)
        b["d"], b["dmin"], b["scales"], b["qs"] = d[:, 0], dmin[:, 0], _join_scales_mins(scales, mins), _join_four_bits(q)
        return b


class Q5_K(Quant, dtype=dtypes.Q5_K, layout=[*_4K, ("qh", "u1", 32), ("qs", "u1", 128)]):
    spread = 2.0

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        scales, mins = _scales_mins(b["scales"])
        d, m = column(b["d"]) * scales, column(b["dmin"]) * mins
        return d[..., None] * (_four_bits(b["qs"]) | (split(b["qh"], 1) << 4)) - m[..., None]

    @classmethod
    def quantize(cls, x: Array, w: Array | None = None) -> Blocks:
        b = np.empty(len(x), cls.layout)
        x = x.reshape(-1, 8, 32)
        w, tries = (_with_mean(x), (15, -0.5, 0.1)) if w is None else (w.reshape(x.shape), (36, -0.9, 0.05))
        d, dmin, scales, mins, q = _fit_affine(x, w, 31, 63, tries)
        b["d"], b["dmin"], b["scales"] = d[:, 0], dmin[:, 0], _join_scales_mins(scales, mins)
        b["qs"], b["qh"] = _join_four_bits(q & 15), join(q >> 4, 1)
        return b


class Q6_K(Quant, dtype=dtypes.Q6_K,
           layout=[("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")]):
    spread = 0.0

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        low = split(b["ql"].reshape(-1, 2, 64), 4).reshape(-1, 16, 16)
        q = (low | (_two_bits(b["qh"]) << 4)).view(np.int8) - np.int8(32)
        return (column(b["d"]) * b["scales"])[..., None] * q

    @classmethod
    def weigh(cls, importance: Array, x: Array, mean_square: Array) -> Array:
        return np.broadcast_to(importance, x.shape)

    @classmethod
    def quantize(cls, x: Array, w: Array | None = None) -> Blocks:
        b = np.empty(len(x), cls.layout)
        x = x.reshape(-1, 16, 16)
        b["d"], b["scales"], q = _fit_signed(x, x * x if w is None else np.ascontiguousarray(w).reshape(x.shape), 32, 128)
        q = q + 32
        b["ql"] = join((q & 15).reshape(-1, 2, 2, 64), 4).reshape(-1, 128)
        b["qh"] = _join_two_bits(q >> 4)
        return b


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
