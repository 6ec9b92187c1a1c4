"""How a type's weights lie in panels: one `Format` per type, from the tables in `format_*.py`.

Comes in: a tensor type. Goes out: its panel layout, with the few lines of kernel code that differ between types.
Must not know: loops over rows and columns, threads, targets.

A panel is 16 rows. Per superblock of the type (`block` elements of a row) it holds a head with scales, then one
group of values per 32 k. It has the bits of its 16 rows, and as many bytes; only where a code in the file is an index
of a grid or a digit in base 3 the panel holds the digits themselves, in 2 to 4 bits each, and is larger for it:

    head     scales of the 16 rows side by side, as the type's functions below lay them out
    values   codes c_g = 4 unsigned bytes per row, k = 4g .. 4g+3, for g = 0 .. 7. A vector of 64 bytes holds one code
             of every row. Codes wider than 4 bits put their upper bits first, in vectors of their own:
      8 bits   c0 .. c7
      4 bits   c0 | c4 << 4, c1 | c5 << 4, c2 | c6 << 4, c3 | c7 << 4
      2 bits   c0 | c1 << 2 | c2 << 4 | c3 << 6, and the same of c4 .. c7
      1 bit    the bits of c0 .. c7 in bits 0 .. 7
        3, 5, 6  = 1 + 2, 1 + 4, 2 + 4 bits
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ggraph.dtypes import DType

from .kernel import inline, simd

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

FORMATS: dict[DType, Format] = {}


@dataclass(frozen=True)
class Format:
    """Functions with kernel code, all for one superblock:
    `code(src, i, g)`   4 codes as the bytes of an int, from a row of the file; i counts blocks of 32 k. With `grid`,
                        the address of its bytes comes as a fourth argument
    `head(src, dst, r)` writes the scales of row r of the panel
    `scales(dst, i)`    a tuple of f32x16: one scale per row, or (wide = 16) two; with `mins` as many offsets after them
    """
    dtype: DType
    bits: int
    head_bytes: int
    code: Callable[..., Any]
    head: Callable[..., Any]
    scales: Callable[..., Any]
    wide: int = 32                                  # k per scale
    bias: int = 0                                   # a code c stands for c - bias
    mins: bool = False
    table: tuple[int, ...] | None = None            # up to 16 values which replace the codes, bias included
    grid: Callable[[], bytes] | None = None

    def __post_init__(self) -> None:
        FORMATS[self.dtype] = self

    @property
    def nbytes(self) -> int:
        """Bytes of a superblock of 16 rows."""
        return self.head_bytes + self.blocks * self.values

    @property
    def values(self) -> int:
        """Bytes of the codes of 32 k."""
        return 64 * self.bits

    @property
    def blocks(self) -> int:
        """Blocks of 32 k per superblock."""
        return self.dtype.block // 32

    @property
    def small(self) -> bool:
        """Whether no code is above 127."""
        return self.bits < 8 and max(self.table or (0,)) < 128


# Codes into panels: `put(dst, r, c0 .. c7)`, and out of them: `get(src)` -> 8 vectors.

@inline
def _put(dst, vector, r, x):
    simd.put_i32(dst + 64 * vector + 4 * r, x)


@inline
def put8(dst, r, c0, c1, c2, c3, c4, c5, c6, c7):
    _put(dst, 0, r, c0)
    _put(dst, 1, r, c1)
    _put(dst, 2, r, c2)
    _put(dst, 3, r, c3)
    _put(dst, 4, r, c4)
    _put(dst, 5, r, c5)
    _put(dst, 6, r, c6)
    _put(dst, 7, r, c7)


@inline
def put4(dst, r, c0, c1, c2, c3, c4, c5, c6, c7):
    m = 0x0F0F0F0F
    _put(dst, 0, r, c0 & m | (c4 & m) << 4)
    _put(dst, 1, r, c1 & m | (c5 & m) << 4)
    _put(dst, 2, r, c2 & m | (c6 & m) << 4)
    _put(dst, 3, r, c3 & m | (c7 & m) << 4)


@inline
def put2(dst, r, c0, c1, c2, c3, c4, c5, c6, c7):
    m = 0x03030303
    _put(dst, 0, r, c0 & m | (c1 & m) << 2 | (c2 & m) << 4 | (c3 & m) << 6)
    _put(dst, 1, r, c4 & m | (c5 & m) << 2 | (c6 & m) << 4 | (c7 & m) << 6)


@inline
def put1(dst, r, c0, c1, c2, c3, c4, c5, c6, c7):
    m = 0x01010101
    low = c0 & m | (c1 & m) << 1 | (c2 & m) << 2 | (c3 & m) << 3
    _put(dst, 0, r, low | (c4 & m) << 4 | (c5 & m) << 5 | (c6 & m) << 6 | (c7 & m) << 7)


@inline
def spread_bits(x):
    """Bits 0 .. 3 as four bytes of 0 or 1."""
    return x & 1 | (x & 2) << 7 | (x & 4) << 14 | (x & 8) << 21


@inline
def put3(dst, r, c0, c1, c2, c3, c4, c5, c6, c7):
    put1(dst, r, c0 >> 2, c1 >> 2, c2 >> 2, c3 >> 2, c4 >> 2, c5 >> 2, c6 >> 2, c7 >> 2)
    put2(dst + 64, r, c0, c1, c2, c3, c4, c5, c6, c7)


@inline
def put5(dst, r, c0, c1, c2, c3, c4, c5, c6, c7):
    put1(dst, r, c0 >> 4, c1 >> 4, c2 >> 4, c3 >> 4, c4 >> 4, c5 >> 4, c6 >> 4, c7 >> 4)
    put4(dst + 64, r, c0, c1, c2, c3, c4, c5, c6, c7)


@inline
def put6(dst, r, c0, c1, c2, c3, c4, c5, c6, c7):
    put2(dst, r, c0 >> 4, c1 >> 4, c2 >> 4, c3 >> 4, c4 >> 4, c5 >> 4, c6 >> 4, c7 >> 4)
    put4(dst + 128, r, c0, c1, c2, c3, c4, c5, c6, c7)


@inline
def get8(src):
    return (simd.load_bytes(src), simd.load_bytes(src + 64), simd.load_bytes(src + 128), simd.load_bytes(src + 192),
            simd.load_bytes(src + 256), simd.load_bytes(src + 320), simd.load_bytes(src + 384),
            simd.load_bytes(src + 448))


@inline
def get4(src):
    a, b = simd.load_bytes(src), simd.load_bytes(src + 64)
    c, d = simd.load_bytes(src + 128), simd.load_bytes(src + 192)
    return a & 15, b & 15, c & 15, d & 15, a >> 4, b >> 4, c >> 4, d >> 4


@inline
def get2(src):
    a, b = simd.load_bytes(src), simd.load_bytes(src + 64)
    return a & 3, a >> 2 & 3, a >> 4 & 3, a >> 6, b & 3, b >> 2 & 3, b >> 4 & 3, b >> 6


@inline
def get1(src):
    h = simd.load_bytes(src)
    return h & 1, h >> 1 & 1, h >> 2 & 1, h >> 3 & 1, h >> 4 & 1, h >> 5 & 1, h >> 6 & 1, h >> 7


@inline
def get3(src):
    h, (a, b, c, d, e, f, g, i) = simd.load_bytes(src), get2(src + 64)
    return (a | h << 2 & 4, b | h << 1 & 4, c | h & 4, d | h >> 1 & 4,
            e | h >> 2 & 4, f | h >> 3 & 4, g | h >> 4 & 4, i | h >> 5 & 4)


@inline
def get5(src):
    h, (a, b, c, d, e, f, g, i) = simd.load_bytes(src), get4(src + 64)
    return (a | h << 4 & 16, b | h << 3 & 16, c | h << 2 & 16, d | h << 1 & 16,
            e | h & 16, f | h >> 1 & 16, g | h >> 2 & 16, i | h >> 3 & 16)


@inline
def get6(src):
    h, j, (a, b, c, d, e, f, g, i) = simd.load_bytes(src), simd.load_bytes(src + 64), get4(src + 128)
    return (a | h << 4 & 48, b | h << 2 & 48, c | h & 48, d | h >> 2 & 48,
            e | j << 4 & 48, f | j << 2 & 48, g | j & 48, i | j >> 2 & 48)


PUT = {1: put1, 2: put2, 3: put3, 4: put4, 5: put5, 6: put6, 8: put8}
GET = {1: get1, 2: get2, 3: get3, 4: get4, 5: get5, 6: get6, 8: get8}
