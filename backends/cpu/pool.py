"""One set of threads for the whole process, which run plans.

Comes in: the address of a plan (int64 [n, 3]: kernel, parameter block, flags). Goes out: the plan has run, or a typed
error says why not. Must not know: graphs, tensors, what kernels do.

The caller is thread 0: handing the work to other threads and sleeping would cost two wake-ups per run. A native call
cannot see Python's signals, so the executor comes back at the first barrier after `SLICE` seconds and is entered
again: Ctrl-C takes effect there, with all workers at rest, for a few microseconds per slice. `abort` acts at the next
barrier (and inside kernels that ask). Contexts take turns; after an error everything can be used again.
"""
from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time

from ggraph.errors import Aborted, BackendError

from . import control as C
from . import executor
from .executor import SINGLE, TOGETHER

__all__ = ["SINGLE", "TOGETHER", "KernelError", "abort", "run", "ticks_per_second"]

SLICE = 0.02                    # seconds of native work between two looks at signals
SPIN = 50e-6                    # seconds that a thread spins before it offers its core to others
PARK = 2e-3                     # seconds that a worker stays awake after a run: longer than a token's work in Python
_native = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)    # releases the GIL while it runs


class KernelError(BackendError):
    """A kernel reported `code` in step `step` of the plan; -1 is an exception."""

    def __init__(self, code: int, step: int):
        super().__init__(f"a kernel reported error {code} in step {step}")
        self.code, self.step = code, step


class Lock:
    """A lock that its own thread can always take again: an interrupt just before it is let go cannot lock it for good.
    Leaving it frees it entirely."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *error: object) -> None:
        self.lock._release_save()  # type: ignore[attr-defined]


class _Pool:
    """Threads and the control block: one per process, since kernels report to one block."""

    def __init__(self) -> None:
        self.turn = Lock()                    # held during a run
        self.owner_lock = Lock()              # so that an abort cannot hit the next owner
        self.owner: object = None
        self.threads: list[threading.Thread] = []
        self.pipes: list[int] = []
        self.ticks = _measure_ticks()
        self.execute, self.work = _native(executor.execute.address), _native(executor.work.address)
        for word, seconds in ((C.SLICE, SLICE), (C.SPIN, SPIN), (C.PARK, PARK)):
            C.words[word] = int(seconds * self.ticks)

    def run(self, table: int, n_steps: int, n_threads: int) -> None:
        words, step = C.words, 0
        words[C.TABLE], words[C.LAST], words[C.ERROR], words[C.ERROR_STEP] = table, n_steps, 0, -1
        while step < n_steps:
            words[C.FIRST] = step
            self.execute(C.ADDRESS, 0, n_threads)
            if words[C.ERROR]:
                raise KernelError(words[C.ERROR], words[C.ERROR_STEP])
            step = words[C.NEXT]
            if words[C.ABORT] and step < n_steps:
                raise Aborted("stopped by abort()")

    def grow(self, n_threads: int) -> None:
        """Make sure that workers 1 to n_threads - 1 exist."""
        while len(self.threads) < n_threads - 1:
            ith, (read, write) = len(self.threads) + 1, os.pipe()
            line = C.WORKERS + C.LINE * ith
            C.words[line + C.PARKED], C.words[line + C.WAKE_READ], C.words[line + C.WAKE_WRITE] = 0, read, write
            args = (C.ADDRESS, ith, C.words[C.GENERATION])
            thread = threading.Thread(target=self.work, args=args, name=f"ggraph-{ith}", daemon=True)
            thread.start()
            self.threads.append(thread)
            self.pipes += read, write
            C.words[C.N_WORKERS] = ith

    def own(self, owner: object) -> None:
        """Who runs now; an abort before this is not meant for it."""
        with self.owner_lock:
            C.words[C.ABORT], self.owner = 0, owner

    def close(self) -> None:
        """End all workers."""
        with self.turn:
            self.execute(C.ADDRESS, 0, 0)
            for thread in self.threads:
                thread.join()
            for fd in self.pipes:
                os.close(fd)
            self.threads, self.pipes = [], []
            C.words[C.N_WORKERS] = 0


_pool: _Pool | None = None
_making = Lock()


def _get() -> _Pool:
    global _pool
    if _pool is not None:
        return _pool
    with _making:
        if _pool is None:
            _pool = _Pool()
            atexit.register(_pool.close)
    return _pool


def _measure_ticks() -> float:
    """Clock ticks per second, to about a percent."""
    ticks, clock = ctypes.c_int64(), _native(executor.clock.address)

    def both() -> tuple[int, float]:
        clock(ctypes.addressof(ticks), 0, 1)
        return ticks.value, time.perf_counter()
    t0, s0 = both()
    time.sleep(0.002)
    t1, s1 = both()
    return (t1 - t0) / (s1 - s0)


def run(table: int, n_steps: int, n_threads: int, owner: object = None, times: int = 0) -> None:
    """Run the plan at address `table`, int64 [n_steps, 3], on `n_threads` threads, after waiting for a turn.
    `owner` is what `abort` may name. With `times`, the address of int64 [n_steps], the clock is stored after each step
    that ends in a barrier, in ticks.
    Raises Aborted, KernelError, or what a signal handler raises; memory that kernels wrote is then half-written."""
    if not 1 <= n_threads < C.MAX_THREADS:
        raise BackendError(f"{n_threads} threads asked for; 1 to {C.MAX_THREADS - 1} are possible")
    pool = _get()
    with pool.turn:
        pool.own(owner)
        try:
            if len(pool.threads) < n_threads - 1:
                pool.grow(n_threads)
            C.words[C.TIMES] = times
            pool.run(table, n_steps, n_threads)
        finally:
            pool.owner = None                   # an abort that is too late is undone by the next run


def abort(owner: object = None) -> None:
    """End the run of `owner` (None: whichever) at its next barrier; from any thread. Nothing running: no effect."""
    pool = _get()
    with pool.owner_lock:
        if owner is None or owner is pool.owner:
            C.words[C.ABORT] = 1


def ticks() -> int:
    """The clock that `times` is given in, now."""
    now = ctypes.c_int64()
    _native(executor.clock.address)(ctypes.addressof(now), 0, 1)
    return now.value


def ticks_per_second() -> float:
    """Rate of the clock that `times` is given in."""
    return _get().ticks


def _after_fork() -> None:
    global _pool, _making
    if _pool is not None:
        atexit.unregister(_pool.close)
    _pool, _making = None, Lock()
    C.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
