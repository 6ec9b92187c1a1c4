"""Making tensors of other shapes: joining, tiling, padding, rolling, constants, diagonals, triangles."""
from __future__ import annotations

import numpy as np

from .arrays import Array, Operand
from .table import f32, kernel


@kernel
def concat(out: Operand, a: Array, b: Array) -> Array:
    return np.concatenate((a, b), axis=3 - out.params["axis"])


@kernel
def repeat(out: Operand, x: Array) -> Array:
    return np.tile(x, [m // n for n, m in zip(x.shape, out.shape)])


@kernel
def pad(out: Operand, x: Array) -> Array:
    result = np.zeros(out.shape, np.float32)
    result[tuple(slice(start, start + n) for start, n in zip(out.params["left"][::-1], x.shape))] = x
    return result


@kernel
def roll(out: Operand, x: Array) -> Array:
    return np.roll(x, out.params["shifts"], axis=(3, 2, 1, 0))


@kernel
def fill(out: Operand, x: Array) -> Array:
    return np.full(out.shape, out.params["value"], np.float32)


@kernel
def arange(out: Operand) -> Array:
    i = np.arange(out.ne[0], dtype=np.float32)
    return (f32(out.params["start"]) + i * f32(out.params["step"])).reshape(out.shape)


@kernel
def diag(out: Operand, x: Array) -> Array:
    return x * np.eye(x.shape[-1], dtype=np.float32)


@kernel
def tri(out: Operand, x: Array) -> Array:
    if out.params["lower"]:
        return np.tril(x, 0 if out.params["diag"] else -1)
    return np.triu(x, 0 if out.params["diag"] else 1)
