"""The pool: order of steps, errors, abort, Ctrl-C, fork, turns; and that everything can be used again afterwards."""
from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from ggraph.backends.cpu import pool
from ggraph.backends.cpu.kernel import inline, kernel, simd
from ggraph.backends.cpu.pool import SINGLE, TOGETHER, KernelError
from ggraph.errors import Aborted, BackendError
from tests.backends.cpu.native import block, run

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

MANY = 1000                                     # steps; with `spin` below about ten seconds


@kernel
def mark(p, ith, nth):
    """[cells][count]: each thread writes step count + 1 to its cell, and fails where another's is not the last step."""
    cells, count = simd.word(p, 0), simd.word(p, 1)
    for i in range(nth):
        if simd.get_i64(cells + 8 * i) < count:
            simd.fail(count + 1)
    simd.put_i64(cells + 8 * ith, count + 1)


@kernel
def who(p, ith, nth):
    """[cells]: add 1 + 100 nth to the thread's cell."""
    at = simd.word(p, 0) + 8 * ith
    simd.put_i64(at, simd.get_i64(at) + 1 + 100 * nth)


@inline
def work(n):
    x = 0.0
    for i in range(n):
        x += 1.0 / (i + 1)
    return x


@kernel
def spin(p, ith, nth):
    """[cells]: about 10 ms of work."""
    simd.put_i64(simd.word(p, 0) + 8 * ith, int(work(8_000_000)))


@kernel
def fail(p, ith, nth):
    """The last thread fails with code 7."""
    if ith == nth - 1:
        simd.fail(7)


@kernel
def raises(p, ith, nth):
    """An exception where [0] is not 0."""
    if simd.word(p, 0):
        raise ValueError


def _slow() -> list[tuple[object, ...]]:
    assert spin.address                         # compiled before the time counts
    return [(spin, block(CELLS))] * MANY


CELLS = np.zeros(64, np.int64)


@pytest.fixture(autouse=True)
def usable_afterwards() -> Iterator[None]:
    CELLS[:] = 0
    yield
    cells = np.zeros(2, np.int64)
    run([(who, block(cells))], 2)
    assert cells.tolist() == [201, 201]


@pytest.mark.parametrize("n_threads", [1, 2, 5])
def test_no_thread_starts_a_step_before_all_have_done_the_last(n_threads: int) -> None:
    run([(mark, block(CELLS, i)) for i in range(300)], n_threads)
    assert CELLS[:n_threads].tolist() == [300] * n_threads


def test_flags() -> None:
    run([(who, block(CELLS), SINGLE), (who, block(CELLS), TOGETHER), (who, block(CELLS))], 3)
    assert CELLS[:4].tolist() == [101 + 2 * 301, 2 * 301, 2 * 301, 0]


@kernel
def follow(p, ith, nth):
    """[cells][count]: fail where the share's own cell does not hold count; then add one."""
    at = simd.word(p, 0) + 8 * ith
    if simd.get_i64(at) != simd.word(p, 1):
        simd.fail(1)
    simd.put_i64(at, simd.word(p, 1) + 1)


@pytest.mark.parametrize("n_threads", [1, 2, 5])
def test_steps_that_belong_together_run_share_by_share(n_threads: int) -> None:
    run([(follow, block(CELLS, i), TOGETHER if i % 3 < 2 else 0) for i in range(300)], n_threads)
    assert CELLS[:n_threads].tolist() == [300] * n_threads


def test_an_error_names_the_step_within_those_that_belong_together() -> None:
    with pytest.raises(KernelError) as e:
        run([(who, block(CELLS)), (follow, block(CELLS, 101), TOGETHER), (fail, block(), TOGETHER), (who, block(CELLS))], 1)
    assert (e.value.code, e.value.step) == (7, 2)


def test_an_error_carries_code_and_step() -> None:
    for n_threads in (1, 2):
        with pytest.raises(KernelError, match="error 7 in step 2") as e:
            run([(who, block(CELLS)), (who, block(CELLS)), (fail, block()), (who, block(CELLS))], n_threads)
        assert (e.value.code, e.value.step) == (7, 2)
    assert CELLS[0] == 2 * 101 + 2 * 201


def test_an_exception_in_a_kernel_is_an_error() -> None:
    run([(raises, block(0))])
    with pytest.raises(KernelError) as e:
        run([(raises, block(0)), (raises, block(1))], 2)
    assert (e.value.code, e.value.step) == (-1, 1)


def test_abort_from_another_thread() -> None:
    steps = _slow()
    threading.Timer(0.1, pool.abort).start()
    start = time.monotonic()
    with pytest.raises(Aborted):
        run(steps, 2)
    assert time.monotonic() - start < 2


def test_abort_names_its_owner() -> None:
    pool.abort()                                # nothing runs: no effect on what comes
    table = np.array([[spin.address, (p := block(CELLS)).ctypes.data, 0]] * 20, np.int64)
    timer = threading.Timer(0.05, pool.abort, ["somebody else"])
    timer.start()
    pool.run(table.ctypes.data, len(table), 2, owner="me")
    timer.join()
    assert p[0]


def test_ctrl_c_takes_effect_within_a_slice() -> None:
    steps = _slow()
    threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(steps, 2)
    assert time.monotonic() - start < 2


def test_runs_of_several_threads_take_turns() -> None:
    cells = np.zeros((4, 64), np.int64)
    steps = [[(mark, block(cells[i], j)) for j in range(200)] for i in range(4)]
    threads = [threading.Thread(target=run, args=(s, 2)) for s in steps]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert (cells[:, :2] == 200).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_makes_its_own_threads() -> None:
    run([(who, block(CELLS))], 2)
    child = os.fork()
    if child == 0:
        cells = np.zeros(2, np.int64)
        run([(who, block(cells))], 2)
        os._exit(int(cells.tolist() != [201, 201]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_waiting_threads_cost_nothing() -> None:
    run([(who, block(CELLS))], 2)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05


def test_the_clock_is_kept_per_step() -> None:
    table = np.array([[spin.address, (p := block(CELLS)).ctypes.data, 0]] * 3, np.int64)
    times = np.zeros(3, np.int64)
    start = time.perf_counter()
    pool.run(table.ctypes.data, 3, 1, times=times.ctypes.data)
    seconds = time.perf_counter() - start
    assert p[0] and (np.diff(times) > 0).all()
    assert (times[2] - times[0]) / pool.ticks_per_second() < seconds


def test_impossible_thread_counts() -> None:
    for n in (0, 100_000):
        with pytest.raises(BackendError, match="threads"):
            pool.run(0, 0, n)
