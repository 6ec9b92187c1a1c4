"""The commands. Ctrl-C while one is still being imported ends it without a traceback."""
from __future__ import annotations

import atexit
import gc
import signal
import sys
from types import TracebackType

_told = sys.excepthook


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        _told(kind, error, trace)


# At its end Python searches all objects for cycles, several times. With Numba's that took 0.1 to 0.2 s of each command, and
# up to 1 s on a busy machine: the longest part of a Ctrl-C. Nothing here needs it; what is frozen is passed over.
atexit.register(gc.freeze)

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    sys.excepthook = _tell
