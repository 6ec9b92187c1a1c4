"""What slots had to forget, kept in host memory up to a limit of bytes: states of sequences with the tokens they are of.

In: slots that are about to lose something. Out: slots that hold the start of a prompt again. For memories that cannot go
back (windows, recurrent states) it is also where checkpoints are. Must not know: queues.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..context import Context
from ..errors import Error
from ..generate import History
from .prefix import common
from .task import Adapters, Task

MIN_KEPT = 32       # tokens: less is evaluated again faster than it is worth a place
NEAR_END = 4        # tokens of a prompt behind its last checkpoint


class Packed:
    """Arrays in one piece of memory: entries come and go in all sizes, and small pieces would leave holes."""

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        parts = {name: np.asarray(a, order="C") for name, a in arrays.items()}
        ends = np.cumsum([_aligned(a.nbytes) for a in parts.values()], dtype=np.int64).tolist()
        self.data = np.empty(ends[-1] if ends else 0, np.uint8)
        self._places = {name: (end - _aligned(a.nbytes), a.dtype, a.shape) for (name, a), end in zip(parts.items(), ends)}
        for name, view in self.arrays().items():
            view[...] = parts[name]

    def arrays(self) -> dict[str, np.ndarray]:
        """Views of them."""
        return {name: np.ndarray(shape, dtype, self.data, start) for name, (start, dtype, shape) in self._places.items()}


def _aligned(n: int) -> int:
    return -(-n // 64) * 64


@dataclass(eq=False)
class Entry:
    tokens: list[int]
    state: Packed
    adapters: Adapters          # with which it was computed

    @property
    def nbytes(self) -> int:
        return self.state.data.nbytes


class Shelf:
    """Least recently used goes first. `stiff`: the memory cannot be cut, so an entry is of use as a whole alone; then a prompt
    leaves at most `n_stops` states, and one every `step` tokens (0: only where it may be of use)."""

    def __init__(self, ctx: Context, limit: int, n_stops: int = 32, step: int = 8192):
        self.ctx, self.limit, self.n_stops, self.step = ctx, limit, n_stops, step
        memory = ctx.memory
        self.stiff = memory.rs is not None or any(g.store.window for g in memory.kv)
        self._entries: list[Entry] = []         # latest used last

    @property
    def nbytes(self) -> int:
        return sum(e.nbytes for e in self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, history: History) -> None:
        """Keep what a sequence holds, unless it is here or too little."""
        tokens = list(history.tokens)
        if not self.limit or len(tokens) < MIN_KEPT or self._holds(history):
            return
        entry = Entry(tokens, Packed(self.ctx.state_get(history.seq)), history.adapters)
        if entry.nbytes > self.limit:
            return
        if not self.stiff:          # what a longer one contains is not needed
            self._entries = [e for e in self._entries
                             if e.adapters != entry.adapters or common(e.tokens, tokens) < len(e.tokens)]
        self._entries.append(entry)
        while self.nbytes > self.limit:
            del self._entries[0]

    def _holds(self, history: History) -> bool:
        tokens = history.tokens
        return any(e.tokens == tokens if self.stiff else common(e.tokens, tokens) == len(tokens)
                   for e in self._entries if e.adapters == history.adapters)

    def _usable(self) -> list[Entry]:
        """With the adapters that are on."""
        adapters = self.ctx.adapters
        return [e for e in self._entries if e.adapters == adapters]

    def best(self, want: Sequence[int]) -> tuple[int, Entry | None]:
        """The entry that has most of a token list, and how much of it."""
        found: tuple[int, Entry | None] = (0, None)
        for e in self._usable():
            n = common(e.tokens, want)
            if n > found[0] and (not self.stiff or n == len(e.tokens)):
                found = (n, e)
        return found

    def longest(self, want: Sequence[int]) -> int:
        """How much of a token list any entry begins with, whether that is of use or not."""
        return max((common(e.tokens, want) for e in self._usable()), default=0)

    def stops(self, task: Task, known: int, found: int) -> None:
        """Tell a task where to keep the state of its prompt, so that another one with the same start can go on from there: where
        it leaves what is known, of which only `found` tokens could be used; near its end, as the last tokens are often the
        template's; and every `step` tokens. Nowhere, where memory can go back by itself."""
        if not (self.stiff and self.limit and self.n_stops):
            return
        n = task.n_prompt - NEAR_END
        at = [*range(self.step, n, self.step)] if self.step else []
        at += [known] if found + MIN_KEPT <= known < n else []
        task.stops.update(dict.fromkeys([*at, n][-self.n_stops:], True))

    def restore(self, entry: Entry, history: History) -> bool:
        """Put an entry in place of what a sequence holds; False, and nothing held, where there is no room for it."""
        history.clear()
        if entry in self._entries:      # it may have made room for what the sequence held before
            self._entries.remove(entry)
            self._entries.append(entry)
        try:
            self.ctx.state_set(entry.state.arrays(), history.seq)
        except Error:
            history.settle()
            return False
        history.tokens[:] = entry.tokens
        return True
