"""Compile what a model needs on its first run, on all cores.

Comes in: kernels. Goes out: all of them loaded, their objects in the cache. Must not know: what they are for.

Numba translates under the lock of one interpreter, so helper processes work through the list from its end and leave
objects in the cache, where this process finds them. A helper that fails costs time only.
"""
from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from ggraph import env

from . import cache, targets
from .kernel import Kernel

FEWEST = 8                      # kernels for which a helper is worth its start (half a second)
MOST = 3                        # helpers


def compile_all(kernels: Iterable[Kernel], progress: Callable[[int, int], None] | None = None) -> int:
    """Load every kernel, compiling those that are not cached; `progress(done, total)` counts the latter.
    Returns how many were missing."""
    todo = list(dict.fromkeys(kernels))
    missing = [k for k in todo if not k.cached]
    with _helpers(missing):
        for i, k in enumerate(missing):
            if progress:
                progress(i, len(missing))
            _ = k.address
    if progress and missing:
        progress(len(missing), len(missing))
    for k in todo:
        _ = k.address
    return len(missing)


@contextlib.contextmanager
def _helpers(kernels: Sequence[Kernel]) -> Iterator[None]:
    """Processes that compile `kernels` from the end, as long as the block lasts."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    n = min(cores - 1, MOST, len(kernels) // FEWEST)
    shared = n > 0 and cache.folder(targets.current()).is_relative_to(env.cache_dir())
    running = [_start(kernels[::-1][i::n]) for i in range(n)] if shared and sys.executable else []
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def _start(kernels: Sequence[Kernel]) -> subprocess.Popen[str]:
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import work; work(sys.stdin.read())"
    process = subprocess.Popen([sys.executable, "-c", code], text=True, stdin=subprocess.PIPE,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert process.stdin
    with contextlib.suppress(OSError), process.stdin as stdin:
        stdin.write(json.dumps([(k.module, k.attribute, k.args) for k in kernels]))
    return process


def work(jobs: str) -> None:
    """What a helper does: store the named kernels that nobody has stored yet."""
    for module, attribute, args in json.loads(jobs):
        made = getattr(importlib.import_module(module), attribute)
        (made if args is None else made(*args)).store()
