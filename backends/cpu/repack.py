"""Weights from the file's rows into panels of 16 rows, as kernels that fill them in parallel.

Comes in: parameter blocks with addresses of rows. Goes out: panels. Must not know: who owns the bytes, products.

`formats` gives the layout of quantized types. F32 and F16 lie as [k][16 rows], BF16 as [k / 2][16 rows][2]. Rows past the
last are zero, and so is the other half of an odd k.
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
    length, nbytes = block(dtype)
    return -(-n_rows // ROWS) * -(-k // length) * nbytes


def block(dtype: DType) -> tuple[int, int]:
    """How many k lie together, and bytes of 16 rows of them."""
    length = 2 if dtype is dtypes.BF16 else dtype.block
    return length, length * ROWS * dtype.nbytes if dtype in PLAIN else FORMATS[dtype].nbytes


def repack_kernel(dtype: DType) -> Kernel:
    """Parameters: address of rows | bytes from row to row | address of panels (best aligned to 64) | n_rows | k."""
    return _repack(dtype.name)


@template
def _repack(name: str) -> Callable[..., None]:
    dtype = dtypes.TYPES[name]
    panel = _pairs if dtype is dtypes.BF16 else _plain(dtype.nbytes) if dtype in PLAIN else _quantized(dtype)
    length, size = block(dtype)

    def repack(p, ith, nth):
        src, stride, dst = simd.word(p, 0), simd.word(p, 1), simd.word(p, 2)
        n_rows, k = simd.word(p, 3), simd.word(p, 4)
        panels, panel_size = (n_rows + ROWS - 1) // ROWS, (k + length - 1) // length * size
        for i in range(panels * ith // nth, panels * (ith + 1) // nth):
            rows, d = min(ROWS, n_rows - ROWS * i), dst + i * panel_size
            if rows < ROWS or k % length:
                clear(d, panel_size)
            panel(src + ROWS * i * stride, stride, d, rows, k)
    return repack


@inline
def clear(address, size):
    for i in range(0, size, 8):
        simd.put_i64(address + i, 0)


def _quantized(dtype: DType) -> Callable[..., None]:
    fmt = FORMATS[dtype]
    put, code, head, length = PUT[fmt.bits], _code(fmt), fmt.head, dtype.block
    n_blocks, from_bytes, to_bytes, head_bytes, values = fmt.blocks, dtype.nbytes, fmt.nbytes, fmt.head_bytes, fmt.values

    @inline
    def panel(src, stride, dst, rows, k):
        for b in range(k // length):
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
    def panel(src, stride, dst, rows, k):
        for start in range(0, k, _CHUNK):
            for r in range(rows):
                for i in range(start, min(k, start + _CHUNK)):
                    if nbytes == 4:
                        simd.put_i32(dst + 64 * i + 4 * r, simd.get_i32(src + r * stride + 4 * i))
                    else:
                        simd.put_u16(dst + 32 * i + 2 * r, simd.get_u16(src + r * stride + 2 * i))
    return panel


@inline
def _pairs(src, stride, dst, rows, k):
    for start in range(0, k, _CHUNK):
        for r in range(rows):
            for i in range(start, min(k, start + _CHUNK)):
                simd.put_u16(dst + 64 * (i >> 1) + 4 * r + 2 * (i & 1), simd.get_u16(src + r * stride + 2 * i))
