"""Rotary positions: a table of sines and cosines per ubatch, then the rotation of each head by it.

Comes in: rope nodes. Goes out: steps. Q and K of all layers that rotate alike share one table in scratch memory, so
that angles are computed once per ubatch. What an angle is, `backends/ref/rope` defines; so does this, in its order.
"""
from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ggraph.dtypes import I32
from ggraph.ops import MROPE, NORMAL, VISION
from ggraph.tensor import Tensor

from ..lowering import Scratch, apart
from ..ref.rope import _sections, yarn_range
from .join import by_tokens
from .kernel import inline, simd, template
from .layout import TOKENS, address, f32_rows, in_rows, n_rows, ne, row, share, unravel
from .lower import Cuts, Emit, lowers
from .ops_move import as_rows
from .ops_rows import follows, normaliser
from .trig import sincos

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

_f32 = np.float32
RESTART = 4                     # beside the axis of a pair: powers of the base are counted anew from here


@template
def _table(adjacent, divided):
    """pos, [factors if divided], then words: table, n_tokens, n_pairs, pairs, and numbers: base, scale, magnitude.

    The table has a row for each token: cosines, then sines, of all pairs. For adjacent pairs each stands twice, the
    sine first with a minus, as the elements of a head want it.
    """
    at = 9 + 9 * divided

    def k(p, ith, nth):
        n_tokens, n_pairs = simd.word(p, at + 1), simd.word(p, at + 2)
        width = (8 if adjacent else 4) * n_pairs
        first, last = share(n_tokens, ith, nth)
        for token in range(first, last):
            out = simd.word(p, at) + 2 * width * token
            _angles(p, address(p, 0) + 4 * token, 4 * n_tokens * (ne(p, 0, 0) > n_tokens), out, out + width, n_pairs)

    @inline
    def _angles(p, pos, stride, cosines, sines, n_pairs):
        """`pos`: the token's position on the first axis, the others `stride` bytes behind each other."""
        base, scale, magnitude = simd.f32(p, at + 4), simd.f32(p, at + 5), simd.f32(p, at + 6)
        t0 = t1 = t2 = t3 = _f32(0)
        for i in range(n_pairs):
            pair = simd.word(p, at + 3) + 8 * i
            axis, keep = simd.get_i32(pair), simd.get_f32(pair + 4)
            if axis & RESTART:
                t0, t1 = _f32(simd.get_i32(pos)), _f32(simd.get_i32(pos + stride))
                t2, t3 = _f32(simd.get_i32(pos + 2 * stride)), _f32(simd.get_i32(pos + 3 * stride))
            theta = (t0 if axis & 3 == 0 else t1) if axis & 3 < 2 else (t2 if axis & 3 == 2 else t3)
            if divided:
                theta = theta / simd.get_f32(address(p, 1) + 4 * i)
            s, c = sincos(scale * theta * (_f32(1) - keep) + theta * keep)
            s, c = _f32(s) * magnitude, _f32(c) * magnitude
            if adjacent:
                simd.put_f32(cosines + 8 * i, c)
                simd.put_f32(cosines + 8 * i + 4, c)
                simd.put_f32(sines + 8 * i, -s)
                simd.put_f32(sines + 8 * i + 4, s)
            else:
                simd.put_f32(cosines + 4 * i, c)
                simd.put_f32(sines + 4 * i, s)
            t0, t1, t2, t3 = t0 * base, t1 * base, t2 * base, t3 * base
    return k


def _turn_adjacent():
    """f(x, y, cosines, sines, n): n elements, whose neighbours are pairs."""
    from .lanes import swap
    swap_pairs = swap(1)

    @inline
    def f(x, y, c, s, n):
        for j in range(0, 64 * (n >> 4), 64):
            v = simd.load_f32(x + j)
            simd.store_f32(y + j, v * simd.load_f32(c + j) + swap_pairs(v) * simd.load_f32(s + j))
        j, m = 64 * (n >> 4), n & 15
        if m:
            v = simd.load_f32_n(x + j, m)
            simd.store_f32_n(y + j, v * simd.load_f32_n(c + j, m) + swap_pairs(v) * simd.load_f32_n(s + j, m), m)
    return f


def _turn_halves():
    """f(x, y, cosines, sines, n): n elements, those of the first half paired with those of the second."""
    @inline
    def f(x, y, c, s, n):
        half, n = 2 * n, n >> 1                     # bytes, pairs
        for j in range(0, 64 * (n >> 4), 64):
            a, b = simd.load_f32(x + j), simd.load_f32(x + half + j)
            cos, sin = simd.load_f32(c + j), simd.load_f32(s + j)
            simd.store_f32(y + j, a * cos - b * sin)
            simd.store_f32(y + half + j, a * sin + b * cos)
        j, m = 64 * (n >> 4), n & 15
        if m:
            a, b = simd.load_f32_n(x + j, m), simd.load_f32_n(x + half + j, m)
            cos, sin = simd.load_f32_n(c + j, m), simd.load_f32_n(s + j, m)
            simd.store_f32_n(y + j, a * cos - b * sin, m)
            simd.store_f32_n(y + half + j, a * sin + b * cos, m)
    return f


@inline
def _share(p, how, ith, nth):
    """First and one past the last head."""
    heads = ne(p, 0, 1) if how == TOKENS else 1
    first, last = share(n_rows(p, 0) // heads, ith, nth)
    return first * heads, last * heads


@template
def _rotate(adjacent):
    """dst, x, then words: table, how many elements to turn, and from where on, how it is cut (`join`)"""
    turn = _turn_adjacent() if adjacent else _turn_halves()

    def k(p, ith, nth):
        table, n, start = simd.word(p, 18), simd.word(p, 19), simd.word(p, 20)
        width = 4 * n if adjacent else 2 * n
        first, last = _share(p, simd.word(p, 21), ith, nth)
        for r in range(first, last):
            i1, i2, i3 = unravel(p, 0, r)
            x, y, c = row(p, 1, i1, i2, i3), row(p, 0, i1, i2, i3), table + 2 * width * i2
            for j in range(0, 4 * start, 4):
                simd.put_f32(y + j, simd.get_f32(x + j))
            turn(x + 4 * start, y + 4 * start, c, c + width, n)
            for j in range(4 * (start + n), 4 * ne(p, 0, 0), 4):
                simd.put_f32(y + j, simd.get_f32(x + j))
    return k


@template
def _norm_rotate(kind, adjacent):
    """dst, x, weight, then words as for `_rotate` with eps before the last: the norm of x times the weight, rotated"""
    turn, normalise = _turn_adjacent() if adjacent else _turn_halves(), normaliser(kind, 1, 0)

    def k(p, ith, nth):
        table, n, start = simd.word(p, 27), simd.word(p, 28), simd.word(p, 29)
        width = 4 * n if adjacent else 2 * n
        first, last = _share(p, simd.word(p, 31), ith, nth)
        for r in range(first, last):
            i1, i2, i3 = unravel(p, 0, r)
            x, y, c = row(p, 1, i1, i2, i3), row(p, 0, i1, i2, i3), table + 2 * width * i2
            normalise(y, x, row(p, 2, i1, i2, i3), x, ne(p, 0, 0), simd.f32(p, 30))
            turn(y + 4 * start, y + 4 * start, c, c + width, n)
    return k


@lowers("rope")
def rope(emit: Emit, node: Tensor) -> bool:
    source = as_rows(emit, node.src[0], "x") if _fits(node) else None
    if source is None:
        return False
    emit(_rotate(int(node.params["mode"] == NORMAL)), node, *source, *_turning(emit, node), cuts=_cuts(node))
    return True


def _enter_normed(kind: str) -> None:
    @lowers(kind, "mul", "rope")
    def lower(emit: Emit, norm: Tensor, mul: Tensor, node: Tensor) -> bool:
        x, w = norm.src[0], mul.src[1]
        if not (_fits(node) and follows(norm, mul) and node.src[0] is mul and f32_rows(x, w)
                and w.ne[0] == x.ne[0] and apart(node, x, w)):
            return False
        kernel = _norm_rotate(kind, int(node.params["mode"] == NORMAL))
        emit(kernel, node, x, w, *_turning(emit, node), float(norm.params["eps"]), cuts=_cuts(node))
        return True


_enter_normed("norm")
_enter_normed("rms_norm")


def _cuts(node: Tensor) -> Cuts:
    return by_tokens(node.ne[2] * node.ne[3])


def _fits(node: Tensor) -> bool:
    _, pos, factors = node.src
    return pos.type is I32 and in_rows(pos) and (factors is None or f32_rows(factors))


def _turning(emit: Emit, node: Tensor) -> tuple[Scratch, int, int]:
    """The table, how many elements of a head it turns, and from where on."""
    x, pos, factors = node.src
    q = node.params
    n = x.ne[0] if q["mode"] == VISION else q["n_dims"]
    return _emit_table(emit, q, pos, factors, x.ne[2], n // 2, int(q["mode"] == NORMAL)), n, q["offset"]


def _emit_table(emit: Emit, q: dict[str, Any], pos: Tensor, factors: Tensor | None, n_tokens: int, n_pairs: int,
                adjacent: int) -> Scratch:
    """Where the sines and cosines will be; computed unless an earlier node has asked for the same."""
    angles = pos, factors, adjacent, *(v for k, v in sorted(q.items()) if k != "offset")
    place, ready = emit.scratch(("rope", angles), int(n_tokens) * n_pairs * (16 if adjacent else 8), True)
    if not ready:
        step = float(np.power(_f32(q["freq_base"]), _f32(-2 / q["n_dims"])))
        pairs = _pairs(q["mode"], q["sections"], n_pairs, _yarn(q) if q["ext_factor"] else None)
        emit(_table(adjacent, int(factors is not None)), pos, *([] if factors is None else [factors]), place,
             n_tokens, n_pairs, pairs.ctypes.data, step, float(q["freq_scale"]), _magnitude(q))
    return place


Yarn = tuple[float, float, float]               # first and last pair of the ramp, its height


def _yarn(q: dict[str, Any]) -> Yarn:
    low, high = yarn_range(q["n_dims"], q["n_ctx_orig"], q["freq_base"], q["beta_fast"], q["beta_slow"])
    return float(low), float(high), float(q["ext_factor"])


def _magnitude(q: dict[str, Any]) -> float:
    """Factor of the rotated values."""
    stretch = _f32(1 + 0.1 * math.log(1 / q["freq_scale"])) if q["ext_factor"] else _f32(1)
    return float(_f32(q["attn_factor"]) * stretch)


@functools.cache
def _pairs(mode: int, sections: tuple[int, ...], n_pairs: int, yarn: Yarn | None) -> np.ndarray:
    """Per pair int32 (axis of its position, with RESTART) and float32 (how far it keeps its unstretched angle).
    Kept for good: compiled plans point at it."""
    pairs = np.zeros((n_pairs, 2), np.int32)
    axis, power = _sections(mode, sections, n_pairs) if mode & MROPE else (0, np.arange(n_pairs))
    pairs[:, 0] = axis + np.where(power == 0, RESTART, 0)
    if yarn is not None:
        low, high, height = map(_f32, yarn)
        ramp = (np.arange(n_pairs, dtype=np.float32) - low) / max(_f32(0.001), high - low)
        pairs[:, 1] = ((1 - np.clip(ramp, 0, 1)) * height).view(np.int32)
    return pairs
