"""What this machine gives at most: bytes read per second, and products of bytes per second.

Comes in: a number of threads. Goes out: `Ceilings`. The kernels are written as those of products are, and do nothing else:
what a product reaches of these figures is its quality.
"""
from __future__ import annotations

import time

import numpy as np

from ggraph.backend import Ceilings, HostBuffer

from . import pool
from .kernel import Kernel, kernel, simd
from .layout import share

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

READ_BYTES = 512 << 20          # far more than caches hold
LINES = 8                       # vectors of 64 bytes per step
STEPS = 1 << 20                 # of 12 products of 64 bytes: some milliseconds
REPEATS = 7


@kernel
def read(p, ith, nth):
    """Parameters: address | number of steps | where 64 bytes per thread may be written."""
    start, end = share(simd.word(p, 1), ith, nth)
    a = b = c = d = simd.splat_i32(0)
    for i in range(start, end):
        at = simd.word(p, 0) + 64 * LINES * i
        a, b = a + simd.load_i32(at), b + simd.load_i32(at + 64)
        c, d = c + simd.load_i32(at + 128), d + simd.load_i32(at + 192)
        a, b = a + simd.load_i32(at + 256), b + simd.load_i32(at + 320)
        c, d = c + simd.load_i32(at + 384), d + simd.load_i32(at + 448)
    simd.store_i32(simd.word(p, 2) + 64 * ith, a + b + c + d)


@kernel
def multiply(p, ith, nth):
    """Parameters: address of 128 bytes to multiply | number of steps | where 64 bytes per thread may be written."""
    x, y = simd.load_bytes(simd.word(p, 0)), simd.load_bytes(simd.word(p, 0) + 64)
    a = b = c = d = e = f = g = h = i = j = k = m = simd.splat_i32(0)
    for _ in range(simd.word(p, 1)):
        a, b, c = simd.dot4(a, x, y), simd.dot4(b, x, y), simd.dot4(c, x, y)
        d, e, f = simd.dot4(d, x, y), simd.dot4(e, x, y), simd.dot4(f, x, y)
        g, h, i = simd.dot4(g, x, y), simd.dot4(h, x, y), simd.dot4(i, x, y)
        j, k, m = simd.dot4(j, x, y), simd.dot4(k, x, y), simd.dot4(m, x, y)
    simd.store_i32(simd.word(p, 2) + 64 * ith, a + b + c + d + e + f + g + h + i + j + k + m)


def ceilings(n_threads: int) -> Ceilings:
    """The best of several runs of each."""
    data = HostBuffer.zeros(READ_BYTES)
    data.data[:] = 1                                    # pages of their own
    n = READ_BYTES // (64 * LINES)
    bandwidth = READ_BYTES / _best(read, data.address, n, n_threads)
    products = 12 * 64 * STEPS * n_threads / _best(multiply, data.address, STEPS, n_threads)
    return Ceilings(bandwidth, products)


def _best(probe: Kernel, address: int, n_steps: int, n_threads: int) -> float:
    """Seconds of the fastest run."""
    out = HostBuffer.zeros(64 * n_threads)
    block = np.array([address, n_steps, out.address], np.int64)
    table = np.array([[probe.address, block.ctypes.data, 0]], np.int64)
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        pool.run(table.ctypes.data, 1, n_threads)
        seconds.append(time.perf_counter() - start)
    return min(seconds)
