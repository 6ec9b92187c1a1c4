"""Ctrl-C at a chosen line of ggraph."""
from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def interrupted(work: Callable[[], object], k: int) -> int:
    """Run it, with Ctrl-C at the k-th line or call of ggraph; how many there were."""
    n = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal n
        if "ggraph" not in frame.f_globals.get("__name__", ""):
            return None
        n += 1
        if n == k:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return n
