"""Orders of lanes that a single op needs, beside the vocabulary of `simd`.

Loads Numba: import it where a kernel is built. Any target has a shuffle for these, so nothing is lowered by hand.
"""
from __future__ import annotations

from typing import Any

from .vector import Builder, Value, f32x16, op, shuffle


def swap(h: int) -> Any:
    """f(x): lane i has what lane i ^ h had. `f = swap(h)` outside of kernels."""
    @op(f32x16(f32x16))
    def swapped(b: Builder, x: Value) -> Value:
        return shuffle(b, x, [i ^ h for i in range(16)])
    return swapped
