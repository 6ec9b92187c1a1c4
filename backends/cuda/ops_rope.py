"""Lowerings of rotary positions."""
from __future__ import annotations

import math

import numpy as np

from ggraph.tensor import Tensor

from .device import Kernel
from .layout import f32
from .lower import Emit, lowers

F = np.float32


def parameters(node: Tensor) -> tuple[int | float, ...]:
    """The struct Rope of kernels/rope.cuh."""
    p = node.params
    magnitude, low, high = F(p["attn_factor"]), F(0), F(0)
    if p["ext_factor"] != 0:
        low, high = yarn_range(p["n_dims"], p["n_ctx_orig"], p["freq_base"], p["beta_fast"], p["beta_slow"])
        magnitude = F(magnitude * F(1 + 0.1 * math.log(1 / p["freq_scale"])))
    step = np.power(F(p["freq_base"]), F(-2 / p["n_dims"]))
    return (int(p["n_dims"]), int(p["mode"]), int(p["offset"]), *map(int, p["sections"]), float(step), float(p["freq_scale"]),
            float(p["ext_factor"]), float(magnitude), float(low), float(high))


def yarn_range(n_dims: int, n_ctx_orig: int, base: float, beta_fast: float, beta_slow: float) -> tuple[np.float32, np.float32]:
    """The pairs between which YaRN blends: those that turn beta_fast and beta_slow times in the original context."""
    def pair(beta: float) -> np.float32:
        turns: np.float32 = F(F(n_dims) * np.log(F(n_ctx_orig) / (F(beta) * F(2) * F(math.pi))) / (2 * np.log(F(base))))
        return turns
    return max(F(0), F(np.floor(pair(beta_fast)))), min(F(n_dims - 1), F(np.ceil(pair(beta_slow))))


@lowers("rope")
def rope(emit: Emit, node: Tensor) -> bool:
    x, pos, factors = node.src
    emit(Kernel("rope", "rope"), node, x, pos, factors, parameters(node), grid=(x.ne[2], x.ne[1], x.ne[3]), block=64)
    return f32(node, x, factors)
