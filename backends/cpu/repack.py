"""Weights from the file's rows into panels of 16 rows, as kernels that fill them in parallel.

Comes in: parameter blocks with addresses of rows. Goes out: panels. Must not know: who owns the bytes, products.

`formats` gives the layout of quantized types. F32, F16 and BF16 lie as [k][16 rows]. Rows past the last are zero.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ggraph import dtypes
from ggraph.dtypes import DType

from . import format_grid, format_k, format_legacy, format_small  # noqa: F401 (the formats enter themselves)
from .formats import FORMATS, PUT, Format
from .kernel import Kernel, inline, simd, template

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

ROWS = 16
PLAIN = (dtypes.F32, dtypes.F16, dtypes.BF16)
_CHUNK = 64                                         # k copied at a time by plain types: 4 KB of a panel, stays in L1


def supports(dtype: DType, k: int) -> bool:
    """Whether rows of `k` weights of this type have panels."""
    return dtype in PLAIN or (dtype in FORMATS and k % dtype.block == 0)


def panel_bytes(dtype: DType, n_rows: int, k: int) -> int:
    """Bytes of the panels of a matrix: what its rows have, rounded up to 16 rows (more for types with grids)."""
    return -(-n_rows // ROWS) * (k // dtype.block) * block_bytes(dtype)


def block_bytes(dtype: DType) -> int:
    """Bytes of 16 rows of a block."""
    return ROWS * dtype.nbytes if dtype in PLAIN else FORMATS[dtype].nbytes


def repack_kernel(dtype: DType) -> Kernel:
    """Parameters: address of rows | bytes from row to row | address of panels (best aligned to 64) | n_rows | k."""
    return _repack(dtype.name)


@template
def _repack(name: str) -> Callable[..., None]:
    dtype = dtypes.TYPES[name]
    panel = _plain(dtype.nbytes) if dtype in PLAIN else _quantized(dtype)
    size, block = block_bytes(dtype), dtype.block

    def repack(p, ith, nth):
        src, stride, dst = simd.word(p, 0), simd.word(p, 1), simd.word(p, 2)
        n_rows, n = simd.word(p, 3), simd.word(p, 4) // block
        panels = (n_rows + ROWS - 1) // ROWS
        for i in range(panels * ith // nth, panels * (ith + 1) // nth):
            rows, d = min(ROWS, n_rows - ROWS * i), dst + i * n * size
            if rows < ROWS:
                clear(d, n * size)
            panel(src + ROWS * i * stride, stride, d, rows, n)
    return repack


@inline
def clear(address, size):
    for i in range(0, size, 8):
        simd.put_i64(address + i, 0)


def _quantized(dtype: DType) -> Callable[..., None]:
    fmt = FORMATS[dtype]
    put, code, head = PUT[fmt.bits], _code(fmt), fmt.head
    n_blocks, from_bytes, to_bytes, head_bytes, values = fmt.blocks, dtype.nbytes, fmt.nbytes, fmt.head_bytes, fmt.values

    @inline
    def panel(src, stride, dst, rows, n):
        for b in range(n):
            d = dst + b * to_bytes
            for r in range(rows):
                s = src + r * stride + b * from_bytes
                head(s, d, r)
                for i in range(n_blocks):
                    put(d + head_bytes + i * values, r, code(s, i, 0), code(s, i, 1), code(s, i, 2), code(s, i, 3),
                        code(s, i, 4), code(s, i, 5), code(s, i, 6), code(s, i, 7))
    return panel


def _code(fmt: Format) -> Callable[..., Any]:
    code = fmt.code
    if fmt.grid is None:
        return code
    grid = simd.data(fmt.grid())

    @inline
    def code_of_grid(src, i, g):
        return code(src, i, g, grid())
    return code_of_grid


def _plain(nbytes: int) -> Callable[..., None]:
    @inline
    def panel(src, stride, dst, rows, n):
        for start in range(0, n, _CHUNK):
            for r in range(rows):
                for k in range(start, min(n, start + _CHUNK)):
                    if nbytes == 4:
                        simd.put_i32(dst + 64 * k + 4 * r, simd.get_i32(src + r * stride + 4 * k))
                    else:
                        simd.put_u16(dst + 32 * k + 2 * r, simd.get_u16(src + r * stride + 2 * k))
    return panel
