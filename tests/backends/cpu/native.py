"""Running single kernels: parameter blocks, plans, aligned memory, random rows of any type."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ggraph import dtypes, quants
from ggraph.backends.cpu import activation, matmul, pool, repack
from ggraph.backends.cpu.formats import FORMATS
from ggraph.backends.cpu.kernel import Kernel
from ggraph.dtypes import DType

Array = Any
RARE = {"Q1_0", "Q2_0", "TQ1_0", "TQ2_0", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "NVFP4"}
TYPES = [pytest.param(t, marks=[pytest.mark.slow] if t.name in RARE else []) for t in (*FORMATS, *repack.PLAIN)]


def block(*words: Any) -> Array:
    """A parameter block; arrays stand for their address."""
    return np.array([w.ctypes.data if isinstance(w, np.ndarray) else int(w) for w in words], np.int64)


def tensor(x: Array) -> list[int]:
    """The 9 words of an array, whose axes are in NumPy order."""
    ne = [*x.shape[::-1], *[1] * (4 - x.ndim)]
    nb = [*x.strides[::-1], *[x.nbytes] * (4 - x.ndim)]
    return [x.ctypes.data, *ne, *nb]


def aligned(nbytes: int, fill: int = 0xA5) -> Array:
    """uint8 memory on a cache line, full of rubbish."""
    raw = np.full(nbytes + 64, fill, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start:start + nbytes]


def run(steps: Sequence[tuple[Any, ...]], n_threads: int = 1) -> None:
    """Steps (kernel, block[, flags]) as one plan."""
    table = np.array([[kernel.address, p.ctypes.data, *(rest or [0])] for kernel, p, *rest in steps], np.int64)
    pool.run(table.ctypes.data, len(table), n_threads)


def call(kernel: Kernel, *words: Any, n_threads: int = 1) -> None:
    run([(kernel, block(*words))], n_threads)


def random_rows(dtype: DType, n_rows: int, k: int, seed: int = 0) -> Array:
    """uint8 [n_rows, row bytes] of normal numbers: any bits with tame scales for types that cannot be packed."""
    rng = np.random.default_rng(seed)
    if dtype in quants.PACKABLE:
        return quants.pack(rng.standard_normal((n_rows, k)).astype(np.float32), dtype)
    raw = rng.integers(0, 256, (n_rows, dtype.row_bytes(k)), np.uint8)
    blocks = raw.reshape(-1, dtype.nbytes).view(quants.QUANTS[dtype].layout)[:, 0]
    for name in blocks.dtype.names or ():
        if blocks.dtype[name] == np.float16:
            blocks[name] = rng.standard_normal(blocks.shape) * 0.01
    if dtype is dtypes.MXFP4:
        blocks["e"] = rng.integers(110, 130, blocks.shape)
    if dtype is dtypes.IQ1_M:                       # d is made of the upper nibbles: sign and exponent in the last
        blocks["scales"][:, 3] = blocks["scales"][:, 3] & 0x0FFF | 0x2000
    return raw


def panels(raw: Array, dtype: DType, k: int, n_threads: int = 1) -> Array:
    """Rows, repacked."""
    out = aligned(repack.panel_bytes(dtype, len(raw), k))
    call(repack.repack_kernel(dtype), raw, raw.strides[0], out, len(raw), k, n_threads=n_threads)
    return out


def tiles(x: Array, dtype: DType, n_threads: int = 1, rows: bool = False) -> Array:
    """f32 [n, k] as activations for weights of a type."""
    form = activation.form(dtype)
    out = aligned(activation.nbytes(form, x.shape[-1], x.size // x.shape[-1]))
    call(activation.activation_kernel(form, rows), *tensor(x), out, n_threads=n_threads)
    return out


def rounded(x: Array, dtype: DType) -> Array:
    """f32 [n, k] as products with weights of this type see it, in f64: what its blocks hold."""
    form = activation.form(dtype)
    if form is activation.F32:
        return x.astype(np.float64)
    if form is activation.BF16:
        return quants.unpack(quants.pack(x, dtypes.BF16), dtypes.BF16).astype(np.float64)
    blocks = tiles(x, dtype, rows=True).reshape(*x.shape[:-1], x.shape[-1] // 32, activation.BLOCK)
    d = blocks[..., :4].copy().view(np.float32).astype(np.float64)
    return (d * blocks[..., 16:].view(np.int8)).reshape(x.shape)


def product(packed: Array, x: Array, dtype: DType, n_rows: int, n_threads: int = 1) -> Array:
    """f32 [n, n_rows]: panels times f32 [n, k]."""
    out = np.full((len(x), n_rows), np.nan, np.float32)
    call(matmul.matmul_kernel(dtype), *tensor(out), tiles(x, dtype, n_threads), packed, x.shape[1], n_threads=n_threads)
    return out
