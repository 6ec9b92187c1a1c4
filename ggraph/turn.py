"""Who may use a Context: one thread at a time, not the hook that the Context is calling, and nobody after its end."""
from __future__ import annotations

import threading

from .errors import Error


class Turn:
    """`with turn:` has it alone, or raises Error at once. `in_hook`: a hook is being called."""

    def __init__(self) -> None:
        self.lock = threading.RLock()       # what an interrupt left locked, its thread can take again
        self.in_hook = self.ended = False

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            raise Error("this Context is in use by another thread; give each thread a Context of its own")
        if self.in_hook:
            self.lock.release()
            raise Error("a hook cannot use the Context that calls it; return STOP, and go on behind `process`")
        if self.ended:
            self.__exit__()
            raise Error("this Context is closed, by itself or with its Model; open a new one")

    def __exit__(self, *error: object) -> None:
        self.lock._release_save()  # type: ignore[attr-defined]

    def end(self) -> bool:
        """With the lock held: nobody uses it from now on. False if that is so already."""
        if self.in_hook:
            raise Error("a hook cannot close the Context that calls it, nor its Model; return STOP, and close behind `process`")
        was, self.ended = self.ended, True
        return not was
