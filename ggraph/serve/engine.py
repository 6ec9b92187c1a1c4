"""The engine: slots, a queue and one thread that computes. Round after round: the next token of every slot that
generates, then prompts as far as one ubatch goes, one `process`, sample, tell.

In: `Request`s from any thread. Out: their events. Requests join and leave between rounds. When cells run short, what idle
slots remember goes first, then the youngest task waits and is run again later. Must not know: HTTP, JSON, text formats.
"""
from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from .. import env
from ..adapters import Adapter
from ..batch import Batch
from ..context import Context
from ..errors import Aborted, ContextFull, Error
from ..vocab import Vocab
from .prefix import common
from .shelf import Shelf
from .slot import Slot, choose
from .task import Failed, Request, Task

T = TypeVar("T")
SCORED_ROWS = 64        # rows of a prompt that are scored together: each has logits for the whole vocabulary


@dataclass
class Stats:
    """Counts since the engine started."""
    prompt_n: int = 0
    cached_n: int = 0
    prompt_ms: float = 0.0
    generated_n: int = 0
    generated_ms: float = 0.0
    n_decode: int = 0
    n_busy: int = 0             # sum over rounds of the slots that took part
    n_tokens_max: int = 0
    n_preempted: int = 0


Part = tuple[Slot, int, bool]       # slot, rows of it in the batch, whether all of them have output


class Engine:
    """Serves the sequences of `ctx` as slots; `ctx` is used on the engine's thread alone, and stays the caller's to close.

    `context_shift`: a text that fills the context goes on without the older half of what comes after `n_keep` tokens;
    else it ends, truncated. `cache_bytes` of host memory may hold what slots had to forget.
    """

    def __init__(self, ctx: Context, vocab: Vocab, *, context_shift: bool = False, cache_bytes: int = 0):
        self.ctx, self.vocab, self.context_shift = ctx, vocab, context_shift
        self.shelf = Shelf(ctx, cache_bytes)
        self.slots = [Slot(ctx, i) for i in range(ctx.n_seq_max)]
        self.stats = Stats()
        self._waiting: list[list[Task]] = []        # choices that start together, by number
        self._inbox: deque[Request | Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._count = 0
        self._thread = threading.Thread(target=self._run, name="ggraph-engine", daemon=True)
        self._thread.start()

    # --- from any thread

    @property
    def n_ctx(self) -> int:
        """Tokens that one slot can hold."""
        return self.ctx.cparams.n_ctx_seq

    @property
    def n_waiting(self) -> int:
        return len(self._waiting) + len(self._inbox)

    def submit(self, request: Request) -> None:
        """Queue a request. Errors, at once: `ContextFull` for a prompt that never fits, `Error` for a request that makes
        no sense."""
        if not request.prompt:
            raise Error("the prompt is empty, and this tokenizer adds no token of its own; give at least one token")
        if len(request.prompt) >= self.n_ctx:
            raise ContextFull(f"request ({len(request.prompt)} tokens) exceeds the available context size "
                              f"({self.n_ctx} tokens), try increasing it")
        if not 1 <= len(request.samplers) <= len(self.slots) or request.slot >= len(self.slots):
            raise Error(f"the request needs {len(request.samplers)} slots, or slot {request.slot}; there are {len(self.slots)}")
        self._post(request)

    def cancel(self, request: Request) -> None:
        """End a request as soon as possible; it gets no more events."""
        request.cancelled = True
        with self._wake:
            self._wake.notify()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the engine's thread, between two rounds."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as e:
                future.set_exception(e)
        self._post(run)
        return future

    def set_adapters(self, adapters: Sequence[tuple[Adapter, float]]) -> Future[None]:
        """From the next round on, for all. What idle slots and the shelf remember was computed without them, and is forgotten;
        texts that are being written go on."""
        def change() -> None:
            self.ctx.set_adapters(adapters)
            self.shelf.clear()
            for slot in self.slots:
                if slot.task is None:
                    slot.history.clear()
        return self.call(change)

    def close(self) -> None:
        """Stop at once; requests that are not done get `Failed`."""
        self._closing = True
        while self._thread.is_alive():
            with self._wake:
                self._wake.notify()
            self.ctx.abort()
            self._thread.join(0.05)

    def _post(self, item: Request | Callable[[], None]) -> None:
        with self._wake:
            if self._closing:
                raise Error("the engine is closed")
            self._inbox.append(item)
            self._wake.notify()

    # --- the thread

    def _run(self) -> None:
        while not self._closing:
            with self._wake:
                while not (self._inbox or self._waiting or any(self._active()) or self._closing):
                    self._wake.wait()
            try:
                self._round()
            except Exception as e:      # a mistake of ours: those who take part pay, the engine lives
                env.log(f"a round failed: {type(e).__name__}: {e}")
                self._fail_all(e)
        self._fail_all(Aborted("the server is stopping"))
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Request):
                item.tell(Failed(Aborted("the server is stopping")))
            else:
                item()

    def _active(self) -> Iterator[Slot]:
        return (s for s in self.slots if s.task is not None)

    def _round(self) -> None:
        self._take_inbox()
        self._drop_cancelled()
        self._assign()
        batch, parts = self._fill()
        while parts:
            if self._process(batch, parts):
                self._read(parts)
                return
            batch, parts = self._fill() if not self._closing else (batch, [])

    def _take_inbox(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Request):
                self._count += 1
                self._waiting.append([Task(item, i, self._count, self.vocab) for i in range(len(item.samplers))])
            else:
                item()

    def _drop_cancelled(self) -> None:
        self._waiting = [tasks for tasks in self._waiting if not tasks[0].request.cancelled]
        for slot in self._active():
            if slot.task is not None and slot.task.request.cancelled:
                self._release(slot)

    def _release(self, slot: Slot) -> None:
        slot.task = None
        self._count += 1
        slot.used = self._count

    # --- who gets a slot

    def _assign(self) -> None:
        """First come, first served; only who waits for one certain slot lets others pass."""
        for tasks in list(self._waiting):
            slot = choose(self.slots, tasks[0])
            idle = [s for s in self.slots if s.task is None and s is not slot]
            if slot is None and tasks[0].request.slot >= 0:
                continue
            if slot is None or len(idle) + 1 < len(tasks) or not self._has_room(tasks):
                return
            self._waiting.remove(tasks)
            for task in tasks:
                task.fresh, task.waits = True, task is not tasks[0]
            slot.task = tasks[0]
            for s, task in zip(sorted(idle, key=lambda s: s.used), tasks[1:]):
                s.task = task

    def _has_room(self, tasks: list[Task]) -> bool:
        """Beside what the active slots hold and will hold at least. One alone always finds room."""
        active = list(self._active())
        stores = [g.store for g in self.ctx.memory.kv if g.store.n_stream == 1 and not g.store.window]
        if not active or not stores:
            return True
        held = len(np.unique(np.concatenate([stores[0].line(s.id).cells for s in active])))
        shared = max(common(s.task.target, tasks[0].target) for s in active if s.task is not None)
        coming = sum(len(s.pending) for s in active)
        return bool(held + coming + len(tasks[0].target) - shared + len(active) + len(tasks) <= stores[0].size)

    # --- one batch

    def _fill(self) -> tuple[Batch, list[Part]]:
        """The next token of every slot that generates, then prompts, oldest first, up to one ubatch in all."""
        batch, parts = Batch(), list[Part]()
        cp = self.ctx.cparams
        active = sorted(self._active(), key=lambda s: s.task.number if s.task else 0)
        for slot in active:         # before anything is queued: slots share what memory has
            if slot.task and slot.task.fresh and not slot.task.waits:
                slot.begin(self.slots, self.shelf)
        ready = [(s, s.task) for s in active if s.task and not s.task.fresh and not s.task.waits]
        for slot, task in ready:
            if task.generating and len(slot.pending) == 1 and self._room_to_go_on(slot):
                slot.history.queue(batch, slot.pending)
                parts.append((slot, 1, False))
        room = min(max(cp.n_ubatch - len(batch), 1), cp.n_batch - len(batch))
        for slot, task in ready:
            if room and slot.task is task and slot.pending:
                room -= self._queue_prompt(slot, task, batch, parts, room)
        return batch, parts

    def _queue_prompt(self, slot: Slot, task: Task, batch: Batch, parts: list[Part], room: int) -> int:
        scored = task.request.prompt_logprobs is not None and len(task.prompt_logprobs) + 1 < task.n_prompt
        pending = slot.pending
        part = pending[:min(room, SCORED_ROWS) if scored else room]
        if (stop := self._checkpoint(task)) > len(slot.tokens):
            part = part[:stop - len(slot.tokens)]
        if not task.generating and task.n_cached == len(slot.tokens):
            task.progress(len(slot.tokens))
        outputs = len(part) if scored else int(len(part) == len(pending))
        slot.history.queue(batch, part, outputs)
        parts.append((slot, len(part), scored))
        return len(part)

    def _checkpoint(self, task: Task) -> int:
        """Where a prompt's state is kept, so that another one with the same start can go on from there: near its end, as
        the last tokens are often the template's. -1: nowhere, the memory can go back by itself."""
        return task.n_prompt - 4 if self.shelf.stiff and self.shelf.limit and task.request.cache_prompt else -1

    def _room_to_go_on(self, slot: Slot) -> bool:
        """The last cell stays free, as in llama.cpp; without context shift the text ends before it."""
        task = slot.task
        assert task is not None
        if len(slot.tokens) + 1 < self.n_ctx:
            return True
        if not self.context_shift:
            task.finish("length", "context")
            self._end(slot, task)
            return False
        n_keep = task.request.n_keep
        n_keep = n_keep + self.vocab.add_bos if 0 <= n_keep <= task.n_prompt else task.n_prompt
        pending = slot.pending
        slot.history.shift(n_keep)
        task.target = slot.tokens + pending
        task.truncated = True
        return True

    def _process(self, batch: Batch, parts: list[Part]) -> bool:
        try:
            self.ctx.process("decode", batch)
        except ContextFull:
            self._settle(parts)
            self._make_room()
            return False
        except Exception as e:
            self._settle(parts)
            if not (isinstance(e, Aborted) and self._closing):
                for slot, _, _ in parts:
                    self._fail(slot, e)
            return False
        self.stats.n_decode += 1
        self.stats.n_busy += len(parts)
        return True

    def _settle(self, parts: list[Part]) -> None:
        for slot, _, _ in parts:
            slot.history.settle()

    def _make_room(self) -> None:
        """Forget what an idle slot remembers, else let the youngest task wait; what is alone and does not fit ends."""
        idle = [s for s in self.slots if s.task is None and s.tokens]
        if idle:
            oldest = min(idle, key=lambda s: s.used)
            env.log(f"cells are short: slot {oldest.id} forgets {len(oldest.tokens)} tokens", level=1)
            self.shelf.put(oldest.history)
            oldest.history.clear()
            return
        active = [s for s in self._active() if s.task and not s.task.waits]
        youngest = max(active, key=lambda s: (s.task.number, s.task.index) if s.task else (0, 0))
        task = youngest.task
        assert task is not None
        if len(active) > 1:
            self._preempt(youngest, task)
        elif task.generating:
            task.finish("length", "context")
            self._end(youngest, task)
        else:
            self._fail(youngest, ContextFull(f"the prompt of {task.n_prompt} tokens does not fit the memory"))

    def _preempt(self, slot: Slot, task: Task) -> None:
        """Its tokens so far will be evaluated again, or come back from the shelf, when there is room; those who wait for it
        wait along."""
        env.log(f"cells are short: slot {slot.id} gives its task up for now, at {len(task.target)} tokens")
        self.stats.n_preempted += 1
        together = [task]
        for s in list(self._active()):
            if s.task is not task and s.task is not None and s.task.request is task.request and s.task.waits:
                together.append(s.task)
                self._release(s)
        self.shelf.put(slot.history)
        slot.history.clear()
        self._release(slot)
        self._waiting.append(together)
        self._waiting.sort(key=lambda tasks: (tasks[0].number, tasks[0].index))

    # --- what came of it

    def _read(self, parts: list[Part]) -> None:
        logits, row = self.ctx.logits, 0
        for slot, n, scored in parts:
            task = slot.task
            assert task is not None
            complete = not slot.pending
            n_rows = n if scored else int(complete)
            rows = logits[row:row + n_rows]
            row += n_rows
            if not task.generating:
                task.n_evaluated += n
                task.progress(len(slot.tokens))
                if len(slot.tokens) == self._checkpoint(task):
                    self.shelf.put(slot.history)
            try:
                if scored:
                    task.score(rows, len(slot.tokens) - n)
                if complete:
                    self._sample(slot, task, rows[-1])
            except Exception as e:      # a row of NaN, a grammar that gave up
                self._fail(slot, e)

    def _sample(self, slot: Slot, task: Task, row: Any) -> None:
        if not task.generating:
            waiting = [s for s in self._active() if s.task and s.task.request is task.request and s.task.waits]
            for s in [slot, *(s for s in waiting if self._fork(slot, s))]:
                if s.task:
                    self._begin_text(s.task)
                    self._sample_one(s, s.task, row)
            return
        self._sample_one(slot, task, row)

    def _begin_text(self, task: Task) -> None:
        task.prime()
        task.prompt_done()
        if task.output.max_tokens == 0:
            task.finish("length", "limit")

    def _fork(self, parent: Slot, slot: Slot) -> bool:
        """Another choice goes on from the same prompt. Where its cells cannot be shared, it evaluates them itself."""
        task = slot.task
        assert task is not None
        task.waits = False
        if not slot.adopt(parent, len(parent.tokens)):
            env.log(f"the prompt of slot {parent.id} cannot be shared: slot {slot.id} evaluates it again")
            return False
        task.begin(task.n_prompt)
        slot.reuse = f"prompt shared with slot {parent.id}"
        return True

    def _sample_one(self, slot: Slot, task: Task, row: Any) -> None:
        if task.output.finish_reason is None:
            task.sample(row)
        if task.output.finish_reason is not None:
            self._end(slot, task)

    def _end(self, slot: Slot, task: Task) -> None:
        done = task.done(slot.id, len(slot.tokens))
        s = self.stats
        s.prompt_n += done.n_evaluated
        s.cached_n += done.n_cached
        s.prompt_ms += done.prompt_ms
        s.generated_n += done.n_generated
        s.generated_ms += done.generated_ms
        s.n_tokens_max = max(s.n_tokens_max, len(slot.tokens))
        self._release(slot)
        task.request.tell(done)

    def _fail(self, slot: Slot, error: Exception) -> None:
        """End the whole request of a slot."""
        if slot.task is None:
            return
        request = slot.task.request
        self._waiting = [tasks for tasks in self._waiting if tasks[0].request is not request]
        for s in list(self._active()):
            if s.task and s.task.request is request:
                self._release(s)
        request.tell(Failed(error))

    def _fail_all(self, error: Exception) -> None:
        for slot in self.slots:
            self._fail(slot, error)
            slot.history.settle()
        for request in {id(tasks[0].request): tasks[0].request for tasks in self._waiting}.values():
            request.tell(Failed(error))
        self._waiting = []
