"""The native half of `pool`: threads claim shares of the plan's steps, one step after the other.

Comes in: the control block (`control`) with a job in it. Goes out: kernels called, NEXT and ERROR_STEP set.
Must not know: Python, graphs.

A plan is int64 [n, 3]: kernel address, parameter block address, flags. A step has as many shares as threads were asked
for. A step with the flag TOGETHER and those after it, up to the first without, count as one: a share of it is the same
share of each. CLAIM holds the present step, its number of shares and how many are taken; a thread takes the next by adding one,
and who finishes the last share opens the next step. So a thread that the system has put aside holds nobody up, unless
in the middle of a share: the others do its part. Shares compute the same bits whoever runs them.
"""
from __future__ import annotations

from . import control as C
from .kernel import atomic, inline, kernel, simd

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

TOGETHER = 1                # flag of a step: the next one belongs to it
SINGLE = 2                  # one share: the kernel runs as (p, 0, 1)
THREADS = 0xFFFF            # a generation is a counter above these bits, and the number of threads that take part
END = 0x7FFFFFFF            # the step of CLAIM when no run is on


@inline
def _at(p, index):
    return p + 8 * index


@inline
def _open(p, step):
    """Let threads claim the shares of a step."""
    n = 1 if simd.word(simd.word(p, C.TABLE) + 24 * step, 2) & SINGLE != 0 else simd.word(p, C.SHARES)
    atomic.store(_at(p, C.CLAIM), (step << 32) | (n << 16))


@inline
def _finish(p, step):
    """The last share of a step is done: the next step, or the end of the run."""
    atomic.store(_at(p, C.DONE), 0)
    if simd.word(p, C.TIMES) != 0:
        simd.put_i64(simd.word(p, C.TIMES) + 8 * step, atomic.ticks())
    atomic.store(_at(p, C.NEXT), step + 1)
    if (step + 1 == simd.word(p, C.LAST) or atomic.load(_at(p, C.ABORT)) != 0 or atomic.load(_at(p, C.ERROR)) != 0
            or atomic.ticks() > simd.word(p, C.DEADLINE)):
        atomic.store(_at(p, C.CLAIM), END << 32)
    else:
        _open(p, step + 1)


@inline
def _note_error(p, step):
    if atomic.load(_at(p, C.ERROR)) != 0 and atomic.load(_at(p, C.ERROR_STEP)) < 0:
        atomic.store(_at(p, C.ERROR_STEP), step)


@inline
def _work_on(p, step, share, n):
    row = simd.word(p, C.TABLE) + 24 * step
    atomic.run(simd.word(row, 0), simd.word(row, 1), share, n)
    _note_error(p, step)
    while simd.word(row, 2) & TOGETHER != 0:
        row += 24
        step += 1
        atomic.run(simd.word(row, 0), simd.word(row, 1), share, n)
        _note_error(p, step)
    if atomic.add(_at(p, C.DONE), 1) == n - 1:
        _finish(p, step)


@inline
def _walk(p):
    """Claim shares until the run ends. What a claim says is complete in itself: the words of the run may be read only
    by who holds a share, since until that is done the run cannot end."""
    while True:
        claim = atomic.add(_at(p, C.CLAIM), 1)
        step, n, share = claim >> 32, (claim >> 16) & 0xFFFF, claim & 0xFFFF
        if step == END:
            return
        if share < n:
            _work_on(p, step, share, n)
        else:
            _wait_for_more(p, step)


@inline
def _wait_for_more(p, step):
    """Until another step is open. Spins for a while, then offers its core to others: a pure spin would starve the very
    thread it waits for when cores are short."""
    limit = atomic.ticks() + simd.word(p, C.SPIN)
    while atomic.load(_at(p, C.CLAIM)) >> 32 == step:
        if atomic.ticks() > limit:
            atomic.give_way()
        else:
            atomic.pause()


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
    simd.put_i64(_at(p, C.SHARES), nth)
    if nth > 0:
        _open(p, simd.word(p, C.FIRST))
    generation = (atomic.load(_at(p, C.GENERATION)) | THREADS) + 1 + nth
    atomic.store(_at(p, C.GENERATION), generation)
    for i in range(1, simd.word(p, C.N_WORKERS) + 1 if nth == 0 else nth):
        line = _at(p, C.WORKERS + C.LINE * i)
        if atomic.swap(_at(line, C.PARKED), 0) == 1:
            atomic.wake(simd.word(line, C.WAKE_WRITE))
    if nth > 0:
        _walk(p)


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
            _walk(p)


@kernel
def clock(p, ith, nth):
    """Store the clock at p."""
    simd.put_i64(p, atomic.ticks())
