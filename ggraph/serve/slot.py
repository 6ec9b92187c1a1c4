"""A slot: one sequence of the Context and the task that has it at the time; and which slot a new task gets.

In: token lists. Out: memory that holds as much of a task's start as could be found. Must not know: queues, threads.
"""
from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from .. import env
from ..context import Context
from ..errors import Error
from ..generate import History
from .chunks import move, plan, refusal
from .prefix import common
from .shelf import Shelf
from .task import Adapters, Task

MIN_SHARE = 16          # tokens that sharing or waiting for another slot's must win, else it is not worth it
MIN_SIMILAR = 0.1       # of a prompt: so much must be in a slot to prefer it to the one unused for longest


class Slot:
    """`task` is None while it is idle; what its last task left stays until someone needs the room. `reuse` tells what the
    last task found of its prompt, and why not more."""

    def __init__(self, ctx: Context, id: int):
        self.id, self.history = id, History(ctx, id)
        self.task: Task | None = None
        self.used = 0           # when, in the engine's count of tasks
        self.reuse = ""
        self.unmovable = refusal(ctx)

    @property
    def tokens(self) -> list[int]:
        return self.history.tokens

    @property
    def pending(self) -> list[int]:
        """Tokens that are still to be evaluated."""
        return [] if self.task is None else self.task.target[len(self.tokens):]

    def adopt(self, other: Slot, n: int) -> bool:
        """Hold the first n tokens of another slot in place of what is here; False, and nothing held, where that cannot be."""
        self.history.clear()
        if not self.history.ctx.memory.seq_cp(other.id, self.id, 0, n):
            return False
        self.tokens[:] = other.tokens[:n]
        return True

    def begin(self, slots: Iterable[Slot], shelf: Shelf) -> None:
        """Find what is there of the task's tokens, in this slot, in others or on the shelf. The task's adapters are on; `slots` are
        those whose tasks have the same, or that have none.

        The task stays `fresh` where another slot is evaluating them just now: then it is better to wait.
        """
        task = self.task
        assert task is not None
        if not task.request.cache_prompt or task.request.prompt_logprobs is not None:
            shelf.put(self.history)
            self.history.clear()
            self._begun(task, 0, "cache off" if not task.request.cache_prompt else "all of the prompt is scored")
            return
        if self.history.adapters != self.history.ctx.adapters:
            shelf.put(self.history)
            self.history.clear()
        want, others = task.target[:-1], [s for s in slots if s is not self and s.history.adapters == self.history.adapters]
        same = common(self.tokens, want)
        own = self._cut(same)
        chunks = plan(self.tokens, want, same, task.cache_reuse) if task.cache_reuse and not self.unmovable else []
        theirs, donor = max(((s._share(self, common(s.tokens, want)), s) for s in others), key=lambda p: p[0], default=(0, self))
        kept, entry = shelf.best(want)
        stays = own + sum(c.n for c in chunks)
        best = max(stays, theirs, kept)
        if self._better_to_wait(others, want, best, shelf.stiff):
            return
        shelf.stops(task, max([same, *(common(s.tokens, want) for s in others), shelf.longest(want)]), best)
        if len(self.tokens) - stays >= MIN_SHARE or best >= stays + MIN_SHARE:
            shelf.put(self.history)
        if best >= stays + MIN_SHARE:
            if theirs == best and self.adopt(donor, theirs):
                self._begun(task, theirs, f"{theirs} tokens shared with slot {donor.id}")
                return
            if entry is not None and kept == best and shelf.restore(entry, self.history):
                self._begun(task, self.history.reuse(task.target), f"{kept} tokens from host memory")
                return
        had = len(self.tokens)
        moved = move(self.history, chunks) if chunks else 0
        n = self.history.reuse(task.target)
        self._begun(task, n, _why(had, same, n) + self._moved(task, moved, sum(c.n for c in chunks)))

    def _moved(self, task: Task, moved: int, planned: int) -> str:
        if not task.cache_reuse:
            return ""
        if self.unmovable:
            return f"; no chunks: {self.unmovable}"
        told = f", {moved} of them moved" if moved else ""
        return told if moved == planned else f"{told}; {planned - moved} more are shared, or a window has let go of them"

    def _better_to_wait(self, others: Iterable[Slot], want: Sequence[int], best: int, stiff: bool) -> bool:
        """Another slot is about to evaluate much more of it. Where memory cannot be cut, it pauses where the two part."""
        assert self.task is not None
        coming = [(common(s.task.target, want), s) for s in others if s.task and _ahead(s.task, self.task)]
        coming = [(n, s) for n, s in coming if not stiff or (s.task and (s.task.fresh or n > len(s.tokens)))]
        n, slot = max(coming, key=lambda p: p[0], default=(0, self))
        if n < best + MIN_SHARE:
            return False
        if stiff and slot.task and not slot.task.fresh:
            slot.task.stops.setdefault(n, False)
        return True

    def _begun(self, task: Task, n: int, reuse: str) -> None:
        self.reuse = reuse
        task.begin(n)
        env.log(f"slot {self.id}: {len(task.target)} tokens, {reuse}", level=1)

    def _cut(self, n: int) -> int:
        """As many of the first n tokens as can be kept: all, or none."""
        stores = self.history.ctx.memory.stores
        return n if n == len(self.tokens) or all(store.can_seq_rm(self.id, n, -1) for store in stores) else 0

    def _share(self, other: Slot, n: int) -> int:
        """As many of the first n tokens as another slot can take over: all, or none."""
        stores = self.history.ctx.memory.stores
        whole = n == len(self.tokens) and n == self.history.ctx.memory.seq_pos_max(self.id) + 1
        return n if n and (whole or all(store.can_seq_cp(self.id, other.id, 0, n) for store in stores)) else 0

    def save(self, path: Path) -> int:
        """Write what the slot remembers to a file: the state of its sequence and the tokens; how many tokens."""
        self._idle()
        fd, temp = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        os.close(fd)
        try:
            self.history.ctx.state_save(temp, self.id)
            with zipfile.ZipFile(temp, "a") as file, file.open("tokens.npy", "w") as member:
                np.save(member, np.array(self.tokens, np.int32))
            os.replace(temp, path)
        finally:
            if os.path.exists(temp):
                os.unlink(temp)
        return len(self.tokens)

    def restore(self, path: Path) -> int:
        """Remember what a file holds in place of what is here; how many tokens. Error, and nothing remembered, if it is
        no such file or does not fit."""
        self._idle()
        self.history.clear()
        try:
            with open(path, "rb") as f, np.load(f, allow_pickle=False) as file:
                tokens = file["tokens"].tolist()
            self.history.ctx.state_load(path, self.id)
            if len(tokens) != self.history.ctx.memory.seq_pos_max(self.id) + 1:
                raise Error("its tokens and its state disagree")
            self.tokens[:] = tokens
        except (Error, OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as e:
            self.history.clear()
            why = e.strerror if isinstance(e, OSError) and e.strerror else e
            raise Error(f"{path.name} cannot be restored: {why}") from e
        return len(tokens)

    def _idle(self) -> None:
        if self.task is not None:
            raise Error(f"slot {self.id} is in use; wait for the end of its request")


def _ahead(task: Task, other: Task) -> bool:
    """It came first and is still evaluating its prompt."""
    return task.number < other.number and not task.generating and not task.waits


def _why(had: int, same: int, kept: int) -> str:
    if kept:
        return f"{kept} of {had} tokens kept"
    if not had:
        return "slot was empty"
    return "another start" if not same else f"{same} tokens are the same, but the memory cannot go back to there"


def choose(slots: Sequence[Slot], task: Task, adapters: Adapters) -> Slot | None:
    """An idle slot for a task with these adapters: the one asked for, the one that holds most of its start, or the one unused for
    longest."""
    idle = [s for s in slots if s.task is None]
    if task.request.slot >= 0:
        return next((s for s in idle if s.id == task.request.slot), None)
    if not idle:
        return None
    oldest = min(idle, key=lambda s: (s.used, s.id))
    if not task.request.cache_prompt:
        return oldest
    same = {s.id: common(s.tokens, task.target) if s.history.adapters == adapters else 0 for s in idle}
    best = max(idle, key=lambda s: (same[s.id], -s.used))
    if same[best.id] <= MIN_SIMILAR * len(task.target):
        return oldest
    loses = len(best.tokens) - same[best.id]
    return oldest if not oldest.tokens and loses > same[best.id] else best      # else it is shared, and both are kept
