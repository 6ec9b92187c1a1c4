"""Rotary positions in all of ggml's modes, with YaRN.

The angle of pair i is position * freq_base^(-2i/n_dims), made by repeated multiplication in float32 as ggml makes it:
at long positions the rounding of that product is visible in the logits.
"""
from __future__ import annotations

import math
from typing import Any

import numpy as np

from ggraph.ops import IMROPE, MROPE, NORMAL, VISION

from .arrays import Array, Operand
from .table import f32, kernel


@kernel
def rope(out: Operand, x: Array, pos: Array, factors: Array | None) -> Array:
    """x [batch, n_tokens, n_head, head] -> the same; pos holds one or four rows of n_tokens positions."""
    p = out.params
    vision = p["mode"] == VISION
    n_pairs = x.shape[-1] // 2 if vision else p["n_dims"] // 2
    theta = _angles(p, pos.reshape(-1, x.shape[1]).astype(np.float32), n_pairs)
    if factors is not None:
        theta = theta / factors.reshape(-1)[:n_pairs]
    theta, magnitude = _yarn(p, theta)
    cos, sin = np.cos(theta)[:, None] * magnitude, np.sin(theta)[:, None] * magnitude
    first, second = _pairs(p, n_pairs)
    result = np.array(x, np.float32)
    result[..., first] = x[..., first] * cos - x[..., second] * sin
    result[..., second] = x[..., first] * sin + x[..., second] * cos
    return result


def _pairs(p: dict[str, Any], n_pairs: int) -> tuple[Array, Array]:
    """Which two elements of a head form pair i."""
    i = np.arange(n_pairs)
    if p["mode"] == NORMAL:
        return p["offset"] + 2 * i, p["offset"] + 2 * i + 1
    return p["offset"] + i, p["offset"] + i + n_pairs


def _angles(p: dict[str, Any], pos: Array, n_pairs: int) -> Array:
    """pos [axes, n_tokens] -> [n_tokens, n_pairs], before any scaling."""
    step = np.power(f32(p["freq_base"]), f32(-2 / p["n_dims"]))
    powers = np.full((*pos.shape, n_pairs), step, np.float32)
    powers[..., 0] = pos
    powers = np.multiply.accumulate(powers, axis=-1)
    if not p["mode"] & MROPE:
        return powers[0]
    axis, exponent = _sections(p["mode"], p["sections"], n_pairs)
    return powers[axis, :, exponent].T


def _sections(mode: int, sections: tuple[int, ...], n_pairs: int) -> tuple[Array, Array]:
    """For each pair: the position axis (time, height, width, extra) that turns it, and its power of the base.

    Sections lie one after the other, or interleaved by threes (IMROPE); VISION counts powers anew in each section.
    """
    sector = np.arange(n_pairs) % sum(sections)
    starts = np.cumsum((0, *sections[:3]))
    axis = np.searchsorted(starts[1:], sector, side="right")
    if mode == IMROPE:
        axis = sector % 3
        axis = np.where(sector < 3 * np.array(sections)[axis], axis, 3)
    return axis, sector - starts[axis] if mode == VISION else np.arange(n_pairs)


def _yarn(p: dict[str, Any], theta: Array) -> tuple[Array, np.float32]:
    """Angles between stretched (slow pairs) and unchanged (fast pairs), and the factor of the rotated values."""
    stretched, magnitude = f32(p["freq_scale"]) * theta, f32(p["attn_factor"])
    if p["ext_factor"] == 0:
        return stretched, magnitude
    low, high = yarn_range(p["n_dims"], p["n_ctx_orig"], p["freq_base"], p["beta_fast"], p["beta_slow"])
    ramp = (np.arange(theta.shape[-1], dtype=np.float32) - low) / max(f32(0.001), high - low)
    keep = (1 - np.clip(ramp, 0, 1)) * f32(p["ext_factor"])
    magnitude = f32(magnitude * f32(1 + 0.1 * math.log(1 / p["freq_scale"])))
    return stretched * (1 - keep) + theta * keep, magnitude


def yarn_range(n_dims: int, n_ctx_orig: int, base: float, beta_fast: float, beta_slow: float) -> tuple[Any, Any]:
    """The pairs between which YaRN blends: those that turn beta_fast and beta_slow times in the original context."""
    def pair(beta: float) -> Any:
        turns = f32(n_ctx_orig) / (f32(beta) * f32(2) * f32(math.pi))
        return f32(n_dims) * np.log(turns) / (2 * np.log(f32(base)))
    return max(f32(0), np.floor(pair(beta_fast))), min(f32(n_dims - 1), np.ceil(pair(beta_slow)))
