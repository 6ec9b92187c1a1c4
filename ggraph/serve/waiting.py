"""Tasks that have no slot yet, and who gets one next: first come, first served.

In: the choices of requests, idle slots. Out: slots with tasks. Must not know: batches, threads.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..context import Context
from .prefix import common
from .slot import Slot, choose
from .task import Adapters, Request, Task


class Waiting:
    """Each entry are choices that start together. `adapters`: those of a task."""

    def __init__(self, ctx: Context, slots: Sequence[Slot], adapters: Callable[[Task], Adapters]):
        self.ctx, self.slots, self.adapters = ctx, slots, adapters
        self._tasks: list[list[Task]] = []

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, tasks: list[Task]) -> None:
        """Behind those that came before, also where it had a slot already."""
        self._tasks.append(tasks)
        self._tasks.sort(key=lambda tasks: (tasks[0].number, tasks[0].index))

    def requests(self) -> list[Request]:
        return list({id(tasks[0].request): tasks[0].request for tasks in self._tasks}.values())

    def drop(self, unwanted: Callable[[Request], bool]) -> None:
        self._tasks = [tasks for tasks in self._tasks if not unwanted(tasks[0].request)]

    def assign(self) -> None:
        """Give slots to whoever can begin. Only who waits for one certain slot lets others pass."""
        for tasks in list(self._tasks):
            slot = choose(self.slots, tasks[0], self.adapters(tasks[0]))
            idle = [s for s in self.slots if s.task is None and s is not slot]
            if slot is None and tasks[0].request.slot >= 0:
                continue
            if slot is None or len(idle) + 1 < len(tasks) or not self._has_room(tasks):
                return
            self._tasks.remove(tasks)
            for task in tasks:
                task.fresh, task.waits = True, task is not tasks[0]
            slot.task = tasks[0]
            for s, task in zip(sorted(idle, key=lambda s: s.used), tasks[1:]):
                s.task = task

    def _has_room(self, tasks: list[Task]) -> bool:
        """Beside what the active slots hold and will hold at least. One alone always finds room."""
        active = [s for s in self.slots if s.task]
        stores = [g.store for g in self.ctx.memory.kv if g.store.n_stream == 1 and not g.store.window]
        if not active or not stores:
            return True
        held = len(np.unique(np.concatenate([stores[0].line(s.id).cells for s in active])))
        shared = max((common(task.target, tasks[0].target) for task in self._alike(active, tasks[0])), default=0)
        coming = sum(len(s.pending) for s in active)
        return bool(held + coming + len(tasks[0].target) - shared + len(active) + len(tasks) <= stores[0].size)

    def _alike(self, active: Sequence[Slot], task: Task) -> Iterator[Task]:
        """Tasks whose cells it could share."""
        return (s.task for s in active if s.task and self.adapters(s.task) == self.adapters(task))
