"""Matrix products whose left side is not a packed weight: the keys of a cache, transposed values.

Comes in: the block that `ops_attention.strided_mul_mat` writes. Goes out: float32 rows of the node. Must not know:
attention. Like `simd` it loads Numba, so it is imported when a kernel is made.

Each result is one chain of fma over k, in the order of k. A thread takes panels of PANEL rows of the left side times
some rows of all matrices on the right that share it; k is cut into pieces for which a panel stays in the cache.
"""
from __future__ import annotations

from collections.abc import Callable

from ggraph import dtypes

from . import simd
from .attention_block import PANEL, PIECE, ROWS
from .attention_rows import columns, product
from .kernel import inline
from .layout import address, nb, ne, share

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

OUT, A, B = range(3)
THREADS, WORK, WORK_BYTES = range(27, 30)


@inline
def _shared(p):
    """Matrices on the right for each on the left, along axes 2 and 3."""
    return ne(p, B, 2) // ne(p, A, 2), ne(p, B, 3) // ne(p, A, 3)


@inline
def _height(p):
    """Rows on the right that are taken of each matrix."""
    n2, n3 = _shared(p)
    return max(1, ROWS // (n2 * n3))


@inline
def _store(p, sums, first, n, i1, i2, i3):
    out = address(p, OUT) + 4 * first + i1 * nb(p, OUT, 1) + i2 * nb(p, OUT, 2) + i3 * nb(p, OUT, 3)
    for i in range(0, n, 16):
        simd.store_f32_n(out + 4 * i, simd.load_f32(sums + 4 * i), n - i)


def multiply_rows(name: str) -> Callable[..., None]:
    """Kernel for a left side of type `name`."""
    type = dtypes.TYPES[name]
    (_, as_columns), times = columns(name, wide=False), product("F32", more=True)

    @inline
    def load(p, a, n, k, m, keys, places, spare):
        """The panel of up to PANEL rows from address a on, m numbers from number k on."""
        for i in range(PANEL):
            simd.put_i64(places + 8 * i, a + min(i, n - 1) * nb(p, A, 1) + k * type.nbytes // type.block)
        for i in range(0, n, 16):
            as_columns(places + 8 * i, m, keys + 4 * i, spare)

    @inline
    def part(p, first, n, start, height, a2, a3, work):
        """Rows `first` to `first` + n on the left, `height` from `start` on of each matrix on the right."""
        (n2, n3), (keys, places) = _shared(p), (work, work + 4 * PANEL * PIECE)
        spare = places + 8 * PANEL
        sums, size = spare + 64 * PIECE, 4 * PANEL * height
        for i in range(0, n2 * n3 * size, 64):
            simd.store_f32(sums + i, simd.splat_f32(0.0))
        a = address(p, A) + first * nb(p, A, 1) + a2 * nb(p, A, 2) + a3 * nb(p, A, 3)
        for k in range(0, ne(p, A, 0), PIECE):
            m = min(PIECE, ne(p, A, 0) - k)
            load(p, a, n, k, m, keys, places, spare)
            for i in range(n2 * n3):
                b2, b3 = a2 * n2 + i % n2, a3 * n3 + i // n2
                b = address(p, B) + start * nb(p, B, 1) + b2 * nb(p, B, 2) + b3 * nb(p, B, 3) + 4 * k
                times(b, nb(p, B, 1), keys, 0, 4 * PANEL, m, sums + i * size, 4 * PANEL, height, n + 15 >> 4, 0, 0)
        for i in range(n2 * n3):
            for j in range(height):
                _store(p, sums + i * size + 4 * PANEL * j, first, n, start + j, a2 * n2 + i % n2, a3 * n3 + i // n2)

    def kernel(p, ith, nth):
        nth = min(nth, simd.word(p, THREADS))
        if ith >= nth:
            return
        work, height = simd.word(p, WORK) + ith * simd.word(p, WORK_BYTES), _height(p)
        panels, parts = (ne(p, A, 1) + PANEL - 1) // PANEL, (ne(p, B, 1) + height - 1) // height
        begin, end = share(ne(p, A, 2) * ne(p, A, 3) * panels * parts, ith, nth)
        for i in range(begin, end):
            first, start, matrix = i // parts % panels * PANEL, i % parts * height, i // (parts * panels)
            part(p, first, min(PANEL, ne(p, A, 1) - first), start, min(height, ne(p, B, 1) - start),
                 matrix % ne(p, A, 2), matrix // ne(p, A, 2), work)
            if simd.aborted():
                return
    return kernel
