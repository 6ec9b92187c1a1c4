"""Tensor types to and from float32: `unpack` for every type, `pack` rounds to those of caches and activations, `quantize` searches.

In: bytes as they lie in a file, and their type. Out: float32. This is the definition that faster kernels are tested
against; it must not know files, tensors or backends. A type is one class (see `base`): its block layout and its
decoding. Infinite, NaN and subnormal scales behave as IEEE arithmetic says, without a warning.
"""
from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ggraph import dtypes
from ggraph.dtypes import DType
from ggraph.quants import fp4, iq, k, legacy, plain, ternary  # noqa: F401 (each registers its types)
from ggraph.quants.base import QUANTS, Quant

__all__ = ["PACKABLE", "QUANTIZABLE", "QUANTS", "Quant", "dot_type", "pack", "quantize", "unpack"]

PACKABLE = (dtypes.F32, dtypes.F16, dtypes.BF16, dtypes.Q8_0, dtypes.Q4_0, dtypes.Q4_1, dtypes.Q5_0, dtypes.Q5_1,
            dtypes.IQ4_NL)                             # what a KV cache can hold
ACTIVATIONS = (dtypes.Q8_1, dtypes.Q8_K)
# What a file may hold that this can make. The searching ones (K and IQ) import Numba when they are first asked for.
QUANTIZABLE = (*PACKABLE, dtypes.Q2_K, dtypes.Q3_K, dtypes.Q4_K, dtypes.Q5_K, dtypes.Q6_K, dtypes.IQ4_XS, dtypes.IQ3_S,
               dtypes.IQ3_XXS, dtypes.IQ2_S, dtypes.IQ2_XS, dtypes.IQ2_XXS, dtypes.IQ1_M, dtypes.IQ1_S, dtypes.TQ1_0,
               dtypes.TQ2_0, dtypes.MXFP4)
CHUNK = 1 << 16     # elements converted at a time, so that temporaries stay in the cache


def unpack(data: npt.NDArray[np.uint8], dtype: DType) -> npt.NDArray[np.float32]:
    """uint8 [..., row bytes] -> float32 [..., n]. ValueError if the rows are not whole blocks."""
    quant = QUANTS[dtype]
    n_blocks, rest = divmod(data.shape[-1], dtype.nbytes)
    if rest:
        raise ValueError(f"rows of {data.shape[-1]} bytes are not whole blocks of {dtype} ({dtype.nbytes} bytes)")
    blocks = np.ascontiguousarray(data, np.uint8).reshape(-1).view(quant.layout)
    out = np.empty((len(blocks), dtype.block), np.float32)
    step = CHUNK // dtype.block
    with np.errstate(all="ignore"):
        for i in range(0, len(blocks), step):
            out[i:i + step] = quant.unpack(blocks[i:i + step]).reshape(-1, dtype.block)
    return out.reshape(*data.shape[:-1], n_blocks * dtype.block)


def pack(x: npt.NDArray[np.float32], dtype: DType) -> npt.NDArray[np.uint8]:
    """float32 [..., n] -> uint8 [..., row bytes]. ValueError if n is not whole blocks, or `dtype` cannot be packed into."""
    if dtype not in PACKABLE + ACTIVATIONS:
        raise ValueError(f"cannot pack into {dtype}; into these: {', '.join(t.name for t in PACKABLE)}")
    n_blocks, rest = divmod(x.shape[-1], dtype.block)
    if rest:
        raise ValueError(f"rows of {x.shape[-1]} elements are not whole blocks of {dtype} ({dtype.block} elements)")
    rows = np.ascontiguousarray(x, np.float32).reshape(-1, dtype.block)
    out = np.empty((len(rows), dtype.nbytes), np.uint8)
    step = CHUNK // dtype.block
    with np.errstate(all="ignore"):
        for i in range(0, len(rows), step):
            out[i:i + step] = QUANTS[dtype].pack(rows[i:i + step]).reshape(-1).view(np.uint8).reshape(-1, dtype.nbytes)
    return out.reshape(*x.shape[:-1], n_blocks * dtype.nbytes)


def dot_type(dtype: DType) -> DType:
    """What ggml's products with rows of this type round their other operand to (its vec_dot_type)."""
    if not dtype.quantized:
        return dtype
    if dtype in (dtypes.Q4_1, dtypes.Q5_1, dtypes.Q8_1):
        return dtypes.Q8_1
    return dtypes.Q8_K if dtype.block == 256 else dtypes.Q8_0


def quantize(x: npt.NDArray[np.float32], dtype: DType, importance: npt.NDArray[np.float32] | None = None) -> npt.NDArray[np.uint8]:
    """float32 [..., n] -> uint8 [..., row bytes], for a file: types with a search lose less than by plain rounding.

    `importance` [n]: how much an error counts in each column (the mean square of what it is multiplied with). ValueError if n is
    not whole blocks, dtype not in QUANTIZABLE, or a value not finite. Threads may call it together.
    """
    if dtype not in QUANTIZABLE:
        raise ValueError(f"cannot quantize to {dtype}; to these: {', '.join(t.name for t in QUANTIZABLE)}")
    n = x.shape[-1]
    if n % dtype.block:
        raise ValueError(f"rows of {n} elements are not whole blocks of {dtype} ({dtype.block} elements)")
    rows, quant = np.ascontiguousarray(x, np.float32).reshape(-1, n), QUANTS[dtype]
    if dtype.quantized and not np.isfinite(rows).all():
        raise ValueError("there are values that are not finite")
    out = np.empty((len(rows), dtype.row_bytes(n)), np.uint8)
    step = max(CHUNK // n, 1)
    with np.errstate(all="ignore"):
        for i in range(0, len(rows), step):
            part = rows[i:i + step]
            w = None if importance is None or quant.spread is None else _weights(quant, part, importance)
            blocks = quant.quantize(part.reshape(-1, dtype.block), None if w is None else w.reshape(-1, dtype.block))
            out[i:i + step] = blocks.reshape(-1).view(np.uint8).reshape(len(part), -1)
    return out.reshape(*x.shape[:-1], -1)


def _weights(quant: type[Quant], rows: npt.NDArray[np.float32], importance: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """What is large for its surroundings counts more: a super-block, or the row of smaller blocks."""
    around = rows.reshape(-1, quant.dtype.block) if quant.dtype.block == 256 else rows
    mean_square = np.repeat(np.mean(around * around, axis=-1), around.shape[-1]).reshape(rows.shape)
    w: npt.NDArray[np.float32] = quant.weigh(importance, rows, mean_square)
    return w
