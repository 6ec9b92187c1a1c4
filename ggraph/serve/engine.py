"""The engine: slots, a queue and one thread that computes.

Round after round: the next token of every slot that generates, then prompts as far as one ubatch goes, one `process`, sample, tell.

In: `Request`s from any thread. Out: their events. Requests join and leave between rounds. When cells run short, what idle
slots remember goes first, then the youngest task waits and is run again later. Must not know: HTTP, JSON, text formats.
"""
from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from types import NoneType
from typing import Any, TypeVar

import numpy as np

from .. import env, errors
from ..adapters import Mix
from ..batch import Batch
from ..context import Context
from ..drawing import Chain
from ..errors import Aborted, ContextFull, Error, Single, at_least, expect, flags
from ..sampling import Sampler
from ..vocab import Vocab
from .batcher import Batcher, Part
from .chunks import refusal
from .guess import Guesser
from .shelf import Shelf
from .slot import Slot
from .stats import Stats
from .task import Adapters, Failed, Request, Task
from .waiting import Waiting

T = TypeVar("T")


class Engine(Single):
    """Serves the sequences of `ctx` as slots; `ctx` is used on the engine's thread alone, and stays the caller's to close.

    `context_shift`: a text that fills the context goes on without the older half of what comes after `n_keep` tokens;
    else it ends, truncated. `cache_bytes` of host memory may hold what slots had to forget, and checkpoints (see `Shelf`).
    `cache_reuse`: at least so many tokens in a row are moved to where a prompt has them (0: never; see `chunks`). `guesser`:
    what guesses at most `n_draft` tokens of each text, which changes nothing but the speed.
    """

    def __init__(self, ctx: Context, vocab: Vocab, *, context_shift: bool = False, cache_bytes: int = 0, cache_reuse: int = 0,
                 n_checkpoints: int = 32, checkpoint_step: int = 8192, guesser: Guesser | None = None, n_draft: int = 0):
        expect("ctx", ctx, Context, "a Context")
        expect("vocab", vocab, Vocab, "a Vocab")
        if ctx.hparams.encoder is not None:
            raise Error(f"{ctx.model.path.name} has an encoder beside its decoder, which slots cannot share; use ggraph-run or "
                        "ggraph.LLM")
        expect("guesser", guesser, (Guesser, NoneType), "a guesser")
        flags(context_shift=context_shift)
        at_least(0, cache_bytes=cache_bytes, cache_reuse=cache_reuse, n_checkpoints=n_checkpoints, checkpoint_step=checkpoint_step,
                 n_draft=n_draft)
        self.ctx, self.vocab = ctx, vocab
        self.shelf = Shelf(ctx, cache_bytes, n_checkpoints, checkpoint_step)
        self.cache_reuse = cache_reuse
        if cache_reuse and (why := refusal(ctx)):
            env.log(f"chunks of the cache cannot be reused with this model: {why}")
        self.slots = [Slot(ctx, i) for i in range(ctx.n_seq_max)]
        self._batcher = Batcher(ctx, vocab, self.shelf, self._end, context_shift, guesser, n_draft)
        self.stats = Stats()
        self._waiting = Waiting(ctx, self.slots, self._batcher.adapters_of)
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
        expect("request", request, Request, "a Request")
        request.check(self.ctx.model.n_vocab)
        if request.adapters is not None:
            Mix.checked(request.adapters, self.ctx.model.weights)
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
        expect("request", request, Request, "a Request")
        request.cancelled = True
        with self._wake:
            self._wake.notify()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the engine's thread, between two rounds."""
        errors.function("function", function)
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as e:
                future.set_exception(e)
        self._post(run)
        return future

    def set_adapters(self, adapters: Adapters) -> Future[None]:
        """From the next round on, for all requests that name none. What was computed with others is not reused; texts that are
        being written go on."""
        def change() -> None:
            self.ctx.set_adapters(adapters)
            self._batcher.adapters = self.ctx.adapters
        return self.call(change)

    @property
    def adapters(self) -> Adapters:
        """Of requests that name none."""
        return self._batcher.adapters

    def close(self) -> None:
        """Stop at once; requests that are not done get `Failed`."""
        self._closing = True
        while self._thread.is_alive():
            with self._wake:
                self._wake.notify()
            self.ctx.abort()
            if self._batcher.guesser is not None:
                self._batcher.guesser.abort()
            self._thread.join(0.05)

    def _post(self, item: Request | Callable[[], None]) -> None:
        with self._wake:
            if self._closing:
                raise Aborted("the server is stopping")
            if not self._thread.is_alive():
                raise Error("the engine's thread is not in this process: it was forked; make an Engine of its own here")
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
        self._waiting.assign()
        guess = True
        while not self._closing:
            batch, parts = self._batcher.fill(self.slots, guess)
            if not parts:
                return
            rows = self._process(batch, parts)
            if rows is not None:
                self._read(parts, rows)
                return
            guess = False           # what failed has to do with less

    def _take_inbox(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Request):
                self._count += 1
                tasks = [Task(item, i, self._count, self.vocab) for i in range(len(item.samplers))]
                for task in tasks:
                    task.cache_reuse = item.cache_reuse if item.cache_reuse >= 0 else self.cache_reuse
                self._waiting.add(tasks)
            else:
                item()

    def _drop_cancelled(self) -> None:
        self._waiting.drop(lambda request: request.cancelled)
        for slot in self._active():
            if slot.task is not None and slot.task.request.cancelled:
                self._release(slot)

    def _release(self, slot: Slot) -> None:
        slot.task = None
        self._count += 1
        slot.used = self._count

    # --- one batch

    def _process(self, batch: Batch, parts: list[Part]) -> np.ndarray | None:
        """The output rows: logits, or tokens where all could be drawn on the device. None where the batch failed."""
        try:
            rows = self._decode(batch, parts)
        except ContextFull:
            self._settle(parts)
            if not any(part.guesses for part in parts):
                self._make_room()
            return None
        except Exception as e:
            self._settle(parts)
            if not (isinstance(e, Aborted) and self._closing):
                for part in parts:
                    self._fail(part.slot, e)
            return None
        self.stats.n_decode += 1
        self.stats.n_busy += len(parts)
        return rows

    def _decode(self, batch: Batch, parts: Sequence[Part]) -> np.ndarray:
        drawing = self.ctx.drawing()
        chains = self._chains(parts) if drawing is not None else []
        if drawing is None or not chains:
            self.ctx.process("decode", batch)
            return self.ctx.logits
        drawing.take([chain for _, chain in chains])
        drawing.draw([sampler.ahead() for sampler, _ in chains])
        self.ctx.draw(batch, drawing)
        return drawing.pending()()

    def _chains(self, parts: Sequence[Part]) -> list[tuple[Sampler, Chain]]:
        """How a device may draw the tokens of all parts; none where logits are wanted of one."""
        found = list[tuple[Sampler, Chain]]()
        for part in (part for part in parts if part.n_outputs):
            task = part.slot.task
            assert task is not None
            chain = None if part.scored or part.guesses or self._waiting_for(task) else task.chain()
            if chain is None:
                return []
            found.append((task.sampler, chain))
        return found

    def _settle(self, parts: Sequence[Part]) -> None:
        """As if the batch had not been. Of one that failed in a later ubatch, earlier rows are in memory; guesses are not text."""
        for part in parts:
            part.slot.history.settle()
            if part.guesses and part.slot.task:
                part.slot.history.cut(min(len(part.slot.tokens), len(part.slot.task.target)))

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
        self._waiting.add(together)

    # --- what came of it

    def _read(self, parts: Sequence[Part], results: np.ndarray) -> None:
        row = 0
        for part in parts:
            rows = results[row:row + part.n_outputs]
            row += part.n_outputs
            slot = part.slot
            task = slot.task
            assert task is not None
            if not task.generating:
                task.n_evaluated += part.n
                task.progress(len(slot.tokens))
                if task.stops.get(len(slot.tokens)):
                    self.shelf.put(slot.history)
            try:
                if part.scored:
                    task.score(rows, len(slot.tokens) - part.n)
                if not slot.pending:
                    self._sample(slot, task, rows if part.guesses else rows[-1:], part.guesses)
            except Exception as e:      # a row of NaN, a grammar that gave up
                self._fail(slot, e)
                if np.isnan(rows).any() or (rows.ndim == 1 and (rows < 0).any()):
                    self.ctx.memory.wipe(slot.id)
                    slot.history.clear()

    def _sample(self, slot: Slot, task: Task, rows: Any, guesses: Sequence[int]) -> None:
        """The next token by the first row; as long as it is the next guess, one more by the next row."""
        if task.generating:
            self._write(slot, task, rows, guesses)
            return
        for s in [slot, *(s for s in self._waiting_for(task) if self._fork(slot, s))]:
            if s.task:
                self._begin_text(s.task)
                self._write(s, s.task, rows, ())

    def _waiting_for(self, task: Task) -> list[Slot]:
        """Slots of other choices, which begin with the row that this one's prompt ends in."""
        return [s for s in self._active() if s.task and s.task.request is task.request and s.task.waits]

    def _write(self, slot: Slot, task: Task, rows: Any, guesses: Sequence[int]) -> None:
        right = 0
        try:
            for i, row in enumerate(rows):
                if task.output.finish_reason is None:
                    task.sample(row)
                right = i
                if task.output.finish_reason is not None or i == len(guesses) or task.target[-1] != guesses[i]:
                    break
        finally:
            if guesses:     # memory keeps what plain decoding had left there
                slot.history.cut(min(len(slot.tokens), len(task.target) - 1))
                self.stats.guessed(task, len(guesses), right, task.output.finish_reason is not None)
        if task.output.finish_reason is not None:
            self._end(slot, task)

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

    def _end(self, slot: Slot, task: Task) -> None:
        done = task.done(slot.id, len(slot.tokens))
        self.stats.done(done)
        self._release(slot)
        task.request.tell(done)

    def _fail(self, slot: Slot, error: Exception) -> None:
        """End the whole request of a slot."""
        if slot.task is None:
            return
        request = slot.task.request
        self._waiting.drop(lambda waiting: waiting is request)
        for s in list(self._active()):
            if s.task and s.task.request is request:
                self._release(s)
        request.tell(Failed(error))

    def _fail_all(self, error: Exception) -> None:
        for slot in self.slots:
            self._fail(slot, error)
            slot.history.settle()
        for request in self._waiting.requests():
            request.tell(Failed(error))
        self._waiting.drop(lambda request: True)
