"""The words that kernels, threads and Python share while a plan runs: one block for the whole process.

Each group stands on cache lines of its own. Compiled code refers to the block by symbol, so cached objects hold no
address of this process. `executor` gives the words their meaning.
"""
from __future__ import annotations

import ctypes

import llvmlite.binding as llvm

LINE = 16                       # int64 words: two cache lines, since neighbours are prefetched in pairs
MAX_THREADS = 256

(ABORT, ERROR, GENERATION, CLAIM, DONE, JOB, WORKERS) = (i * LINE for i in range(7))
ERROR_STEP = ERROR + 1          # ERROR: the code that a kernel failed with; here the step, -1 while there is none
# The job: rows FIRST to LAST of the table; where to store the clock after each step, or 0; how many ticks to run.
(TABLE, FIRST, LAST, TIMES, SLICE) = range(JOB, JOB + 5)
(DEADLINE, NEXT) = range(JOB + 5, JOB + 7)              # when that is over; the step that would have come next
(SPIN, PARK, N_WORKERS) = range(JOB + 7, JOB + 10)      # ticks until a waiting thread yields, and until a worker sleeps
SHARES = JOB + 10                                       # into how many shares a step is cut
(PARKED, WAKE_READ, WAKE_WRITE) = range(3)              # one line per worker, from WORKERS on: sleeping; its pipe

_SIZE = WORKERS + LINE * MAX_THREADS
_memory = (ctypes.c_int64 * (_SIZE + LINE))()
ADDRESS: int = -(-ctypes.addressof(_memory) // (8 * LINE)) * 8 * LINE
words = (ctypes.c_int64 * _SIZE).from_address(ADDRESS)


def publish() -> None:
    """Make the words known to compiled code under their symbols."""
    for name, word in (("ggraph_abort", ABORT), ("ggraph_error", ERROR)):
        llvm.add_symbol(name, ADDRESS + 8 * word)


def reset() -> None:
    """No thread, no job (also after a fork, where no worker lives on)."""
    ctypes.memset(ADDRESS, 0, 8 * _SIZE)
