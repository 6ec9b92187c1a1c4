"""Searches for the scales that lose least, compiled by Numba: what quantizing to K and IQ types spends its time on.

In: groups of values and their weights, float32 [n, s]. Out: a scale for each group (and an offset, or points of a grid) that
makes the weighted squared error small. Each search tries some scales around the one that just holds the largest value,
rounds, solves for the best scale of these codes by least squares, and keeps the best try. They know no block layout.
This module is imported when something is first quantized; compiled code is kept in the cache folder.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from ggraph import env
from ggraph.errors import Error

LEAST = np.float32(1e-30)           # a group below this is zero
FLAGS = {"reassoc", "contract", "nsz", "arcp"}      # sums may be vectorised; NaN and infinities stay what they are


def _compiled(function: Callable[..., Any]) -> Any:
    """Numba's function, kept on disk in the cache folder of ggraph where that can be written."""
    before = numba.config.CACHE_DIR
    try:
        numba.config.CACHE_DIR = str(env.make_cache_dir("quantize"))
        return numba.njit(nogil=True, fastmath=FLAGS, cache=True)(function)
    except (Error, RuntimeError):           # nowhere to keep it: this process compiles for itself
        return numba.njit(nogil=True, fastmath=FLAGS)(function)
    finally:
        numba.config.CACHE_DIR = before


def _inlined(function: Callable[..., Any]) -> Any:
    """For what takes no longer than calling it would."""
    return numba.njit(inline="always", fastmath=FLAGS)(function)


@_compiled
def _extreme(x: Any) -> Any:
    """The first of the elements of x [s] that have the largest magnitude, with its sign; 0 where all are next to nothing."""
    most, extreme = np.float32(0), np.float32(0)
    for j in range(len(x)):
        if abs(x[j]) > most:
            most, extreme = abs(x[j]), x[j]
    return extreme if most >= LEAST else np.float32(0)


@_compiled
def codes(x: Any, w: Any, low: int, high: int, n_tries: int, step: float) -> Any:
    """d [n] for codes low to high: x is about d * code. With low = 0, x is not negative."""
    n, s = x.shape
    out = np.zeros(n, np.float32)
    half, last = np.float32(0.5 - low), np.float32(high - low + 0.5)
    for i in range(n):
        extreme = _extreme(x[i])
        if extreme == 0:
            continue
        best = np.float32(-1)
        for t in range(-n_tries, n_tries + 2):      # the last one rounds with the best scale so far
            if t <= n_tries:
                inverse = np.float32(low - step * t if low < 0 else high + step * t) / extreme
            elif out[i] == 0:
                continue
            else:
                inverse = np.float32(1) / out[i]
            xq, qq = np.float32(0), np.float32(0)
            for j in range(s):
                q = np.float32(np.int32(min(max(x[i, j] * inverse + half, np.float32(0)), last)) + low)
                xq += w[i, j] * x[i, j] * q
                qq += w[i, j] * q * q
            if qq > 0 and xq * xq > best * qq:
                best = xq * xq / qq
                out[i] = xq / qq
    return out


@_compiled
def affine(x: Any, w: Any, top: int, n_tries: int, first: float, step: float) -> Any:
    """(d [n], m [n]) for codes 0 to top: x is about d * code - m, with m not negative.

    Each scale is tried with the lowest value on the grid, and with zero on it, where most values lie if one is far off.
    """
    n, s = x.shape
    scale, offset = np.zeros(n, np.float32), np.zeros(n, np.float32)
    for i in range(n):
        low, high = np.float32(0), x[i, 0]
        sw, sx = np.float32(0), np.float32(0)
        for j in range(s):
            low, high = min(low, x[i, j]), max(high, x[i, j])
            sw += w[i, j]
            sx += w[i, j] * x[i, j]
        offset[i] = -low
        if high - low < LEAST:
            continue
        best = np.float32(np.inf)
        for t in range(2 * n_tries + 3):            # with the lowest value on the grid, with zero on it; the best so far
            inverse = np.float32(top + first + step * (t % (n_tries + 1))) / (high - low)
            base = low
            if t == 2 * n_tries + 2:
                if scale[i] <= 0:
                    continue
                inverse, base = np.float32(1) / scale[i], -offset[i]
            elif t > n_tries:
                if low == 0:                        # the same again
                    continue
                base = -np.float32(np.int32(np.float32(0.5) - low * inverse)) / inverse
            q1, qq, xq = np.float32(0), np.float32(0), np.float32(0)
            for j in range(s):
                v = (x[i, j] - base) * inverse
                q = np.float32(np.int32(max(min(v, np.float32(top)), np.float32(0)) + np.float32(0.5)))
                q1 += w[i, j] * q
                qq += w[i, j] * q * q
                xq += w[i, j] * x[i, j] * q
            det = sw * qq - q1 * q1
            if det > 0:
                d, b = (sw * xq - sx * q1) / det, (qq * sx - q1 * xq) / det
                if b > 0:
                    d, b = xq / qq, np.float32(0)
                error = d * d * qq + 2 * d * b * q1 + b * b * sw - 2 * d * xq - 2 * b * sx
                if error < best:
                    best, scale[i], offset[i] = error, d, -b
    return scale, offset


@_compiled
def polish(x: Any, w: Any, scales: Any, mins: Any, d: Any, dmin: Any, bounds: Any) -> None:
    """Change the scales and mins [n, g], in place, by one where that lowers the error of d * scale * code - dmin * min.

    x, w [n, g, s]; d, dmin [n]; `bounds`: (lowest code, highest code, lowest scale, highest scale, highest min), int32. A highest
    min of 0: there are none.
    """
    n, g, s = x.shape
    low, high = np.float32(bounds[0]), np.float32(bounds[1])
    reach = 1 if bounds[4] > 0 else 0
    for i in range(n):
        for k in range(g):
            best = np.float32(np.inf)
            scale, offset = scales[i, k], mins[i, k]
            for ds in range(-1, 2):
                a = scale + ds
                if a < bounds[2] or a > bounds[3]:
                    continue
                step = d[i] * np.float32(a)
                inverse = np.float32(0) if step == 0 else np.float32(1) / step
                for dm in range(-reach, reach + 1):
                    b = offset + dm
                    if b < 0 or b > bounds[4]:
                        continue
                    base = dmin[i] * np.float32(b)
                    error = np.float32(0)
                    for j in range(s):
                        v = min(max((x[i, k, j] + base) * inverse, low), high)
                        q = np.float32(np.int32(v - low + np.float32(0.5))) + low
                        miss = x[i, k, j] + base - step * q
                        error += w[i, k, j] * miss * miss
                    if error < best:
                        best, scales[i, k], mins[i, k] = error, a, b


@_compiled
def table(x: Any, w: Any, values: Any, n_tries: int) -> Any:
    """d [n] for codes that stand for `values`, float32, whole, in rising order, -128 to 127: x is about d * values[code]."""
    n, s = x.shape
    out = np.zeros(n, np.float32)
    nearest = np.zeros(512, np.float32)         # in steps of a half: middles between whole values lie on them
    for i in range(512):
        k = 0
        for m in range(len(values) - 1):
            k += np.float32(i - 256) >= values[m] + values[m + 1]
        nearest[i] = values[k]
    for i in range(n):
        extreme = _extreme(x[i])
        if extreme == 0:
            continue
        best = np.float32(-1)
        for t in range(-n_tries, n_tries + 3):
            inverse = (values[0] + np.float32(t)) / extreme
            if t == n_tries + 1:                    # the extreme value at the other end
                inverse = values[-1] / extreme
            elif t == n_tries + 2:
                if out[i] == 0:
                    continue
                inverse = np.float32(1) / out[i]
            xq, qq = np.float32(0), np.float32(0)
            for j in range(s):
                v = min(max(x[i, j] * inverse * np.float32(2) + np.float32(256), np.float32(0)), np.float32(511))
                q = nearest[np.int32(v)]
                xq += w[i, j] * x[i, j] * q
                qq += w[i, j] * q * q
            if qq > 0 and xq * xq > best * qq:
                best = xq * xq / qq
                out[i] = xq / qq
    return out


@_inlined
def _closest(x: Any, w: Any, d: Any, points: Any, near: Any, level: Any, shifts: Any, thorough: bool) -> Any:
    """(point, number of the shift) for which d * (point + shift) is nearest to x [k]; arguments as `grid` has them.

    `thorough`: a place that is a point is compared with its neighbours all the same.
    """
    k = len(x)
    inverse, nearest, point, shift = np.float32(1) / d, np.float32(np.inf), np.int32(0), np.int32(0)
    for h in range(len(shifts)):
        place = 0
        for j in range(k - 1, -1, -1):
            v = (x[j] * inverse - shifts[h] - level[0]) / level[1]
            place = place * np.int32(level[2]) + np.int32(min(max(v, np.float32(0)), level[2] - 1) + np.float32(0.5))
        for c in range(near.shape[1]):
            p = near[place, c]
            if p < 0:
                if thorough:
                    continue
                break
            far = np.float32(0)
            for j in range(k):
                miss = x[j] - d * (points[p, j] + shifts[h])
                far += w[j] * miss * miss
            if far < nearest:
                nearest, point, shift = far, np.int32(p), np.int32(h)
    return point, shift


@_compiled
def grid(x: Any, w: Any, points: Any, near: Any, level: Any, shifts: Any, ratios: Any, fixed: Any) -> Any:
    """Points of a grid for groups of values: x is about d * (point + shift), k neighbours at a time.

    `points` float32 [p, k]; `near` int16 [levels ** k, c]: the points around each place where all coordinates are one of the
    levels, nearest first; a place that is a point has that one in front and `-1` behind it while scales are tried. `level`:
    (first level, distance of levels, how many). `ratios`: scales tried, as (largest value) / (ratio * scale). `fixed` [n]: scales
    that are given instead, unless empty. Returns d [n], the score [n] (what of the weighted squares is explained), the points
    int32 [n, s / k] and the number of the shift, uint8 [n, s / k].
    """
    n, s = x.shape
    k = points.shape[1]
    m = s // k
    scale, score = np.zeros(n, np.float32), np.zeros(n, np.float32)
    index, shifted = np.zeros((n, m), np.int32), np.zeros((n, m), np.uint8)
    trial, trial_shift = np.zeros(m, np.int32), np.zeros(m, np.uint8)
    n_ratios = len(ratios)
    for i in range(n):
        most = abs(_extreme(x[i]))
        given = len(fixed) > 0
        if most == 0 or (given and fixed[i] == 0):
            continue
        best = np.float32(-1)
        for t in range(1 if given else n_ratios + 2):       # the last two with the best scale so far
            if given:
                d = fixed[i]
            elif t < n_ratios:
                d = most / ratios[t]
            else:
                d = scale[i]
                if d == 0:
                    continue
            xq, qq = np.float32(0), np.float32(0)
            for g in range(m):
                part = slice(g * k, g * k + k)
                trial[g], trial_shift[g] = _closest(x[i, part], w[i, part], d, points, near, level, shifts, given or t >= n_ratios)
                for j in range(k):
                    q = points[trial[g], j] + shifts[trial_shift[g]]
                    xq += w[i, g * k + j] * x[i, g * k + j] * q
                    qq += w[i, g * k + j] * q * q
            if given or (qq > 0 and xq > 0 and xq * xq > best * qq):
                best = xq * xq / qq if qq > 0 else np.float32(0)
                scale[i] = xq / qq if qq > 0 else np.float32(0)
                score[i] = best
                index[i], shifted[i] = trial, trial_shift
    return scale, score, index, shifted
