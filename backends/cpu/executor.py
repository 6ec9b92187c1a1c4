"""The native half of `pool`: every thread walks the plan's table and meets the others after each step.

Comes in: the control block (`control`) with a job in it. Goes out: kernels called, NEXT and ERROR_STEP set.
Must not know: Python, graphs.

A plan is int64 [n, 3]: kernel address, parameter block address, flags. Whether to go on is decided by whoever reaches
a barrier last, and published with the barrier, so that all threads leave at the same step.
"""
from __future__ import annotations

from . import control as C
from .kernel import atomic, inline, kernel, simd

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

NO_BARRIER = 1              # flag of a step: the next one may start while others still run this one
SINGLE = 2                  # only thread 0 runs it, as (p, 0, 1)
THREADS = 0xFFFF            # a generation is a counter above these bits, and the number of threads that take part


@inline
def _at(p, index):
    return p + 8 * index


@inline
def _stop(p, step):
    """Called by the last thread at a barrier: whether the run ends here."""
    atomic.store(_at(p, C.NEXT), step + 1)
    if atomic.load(_at(p, C.ABORT)) != 0 or atomic.load(_at(p, C.ERROR)) != 0:
        return 1
    return 1 if atomic.ticks() > simd.word(p, C.DEADLINE) else 0


@inline
def _barrier(p, step, nth):
    """Wait until all threads are here; 1 when the run shall end. Spins for a while, then offers its core to others:
    a pure spin would starve the very thread it waits for when cores are short."""
    phase = atomic.load(_at(p, C.PHASE))
    if atomic.add(_at(p, C.ARRIVED), 1) == nth - 1:
        stop = _stop(p, step)
        atomic.store(_at(p, C.ARRIVED), 0)
        atomic.store(_at(p, C.PHASE), (phase & ~1) + 2 + stop)
        return stop
    limit = atomic.ticks() + simd.word(p, C.SPIN)
    now = phase
    while now == phase:
        if atomic.ticks() > limit:
            atomic.give_way()
        else:
            atomic.pause()
        now = atomic.load(_at(p, C.PHASE))
    return now & 1


@inline
def _walk(p, ith, nth):
    table, last, times = simd.word(p, C.TABLE), simd.word(p, C.LAST), simd.word(p, C.TIMES)
    for i in range(simd.word(p, C.FIRST), last):
        row = table + 24 * i
        flags = simd.word(row, 2)
        if flags & SINGLE == 0:
            atomic.run(simd.word(row, 0), simd.word(row, 1), ith, nth)
        elif ith == 0:
            atomic.run(simd.word(row, 0), simd.word(row, 1), 0, 1)
        if atomic.load(_at(p, C.ERROR)) != 0 and atomic.load(_at(p, C.ERROR_STEP)) < 0:
            atomic.store(_at(p, C.ERROR_STEP), i)
        stop = _barrier(p, i, nth) if flags & NO_BARRIER == 0 or i + 1 == last else 0
        if times != 0 and ith == 0:
            simd.put_i64(times + 8 * i, atomic.ticks())
        if stop != 0:
            break


@inline
def _wait(p, line, seen):
    """The first generation after `seen`. Spins, then yields, then sleeps on the worker's pipe. PARKED changes only by
    swaps: whoever takes the 1 away decides whether a byte is sent, so no wake-up is lost or left over."""
    start = atomic.ticks()
    waited = 0
    while waited < simd.word(p, C.PARK):
        if atomic.load(_at(p, C.GENERATION)) != seen:
            return atomic.load(_at(p, C.GENERATION))
        if waited < simd.word(p, C.SPIN):
            atomic.pause()
        else:
            atomic.give_way()
        waited = atomic.ticks() - start
    atomic.swap(_at(line, C.PARKED), 1)
    if atomic.load(_at(p, C.GENERATION)) == seen or atomic.swap(_at(line, C.PARKED), 0) == 0:
        atomic.sleep(simd.word(line, C.WAKE_READ))
    return atomic.load(_at(p, C.GENERATION))


@kernel
def execute(p, ith, nth):
    """Thread 0: start a generation of `nth` threads, take part, return when all are done. nth = 0 ends all workers."""
    simd.put_i64(_at(p, C.DEADLINE), atomic.ticks() + simd.word(p, C.SLICE))
    generation = (atomic.load(_at(p, C.GENERATION)) | THREADS) + 1 + nth
    atomic.store(_at(p, C.GENERATION), generation)
    for i in range(1, simd.word(p, C.N_WORKERS) + 1 if nth == 0 else nth):
        line = _at(p, C.WORKERS + C.LINE * i)
        if atomic.swap(_at(line, C.PARKED), 0) == 1:
            atomic.wake(simd.word(line, C.WAKE_WRITE))
    if nth > 0:
        _walk(p, 0, nth)


@kernel
def work(p, ith, nth):
    """A worker's life; `nth` is the generation at its birth."""
    seen = nth
    while True:
        seen = _wait(p, _at(p, C.WORKERS + C.LINE * ith), seen)
        n = seen & THREADS
        if n == 0:
            return
        if ith < n:
            _walk(p, ith, n)


@kernel
def clock(p, ith, nth):
    """Store the clock at p."""
    simd.put_i64(p, atomic.ticks())
