"""Orders of lanes that a single op needs, beside the vocabulary of `simd`.

Loads Numba: import it where a kernel is built. Any target has a shuffle for these, so nothing is lowered by hand.
"""
from __future__ import annotations

from .vector import Builder, Value, f32x16, op, shuffle


@op(f32x16(f32x16))
def swap_pairs(b: Builder, x: Value) -> Value:
    """Lanes 1, 0, 3, 2, ... 15, 14."""
    return shuffle(b, x, [i ^ 1 for i in range(16)])
