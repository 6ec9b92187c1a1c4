"""The commands. Ctrl-C while one is still being imported ends it without a traceback."""
from __future__ import annotations

import signal
import sys
from types import TracebackType

_told = sys.excepthook


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        _told(kind, error, trace)


if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    sys.excepthook = _tell
