"""What a round computes: the next tokens of slots that generate, then prompts, oldest first, as far as one ubatch goes.

In: slots with their tasks. Out: a batch, and which rows of it are whose. Must not know: queues, threads, what is sampled.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from .. import env
from ..batch import Batch
from ..context import Context
from ..errors import Aborted
from ..vocab import Vocab
from .guess import Ask, Guesser
from .shelf import Shelf
from .slot import Slot
from .task import Adapters, Task

SCORED_ROWS = 64        # rows of a prompt that are scored together: each has logits for the whole vocabulary


@dataclass
class Part:
    """Rows of one slot: `n` tokens, of which the last `n_outputs` have logits and the last ones are `guesses`. `scored`: they
    are a prompt's whose log-probabilities are wanted."""
    slot: Slot
    n: int
    n_outputs: int
    guesses: list[int] = field(default_factory=list)
    scored: bool = False


class Batcher:
    """`full` is called with a slot whose text ends because its context is full: without `context_shift`."""

    def __init__(self, ctx: Context, vocab: Vocab, shelf: Shelf, full: Callable[[Slot, Task], None], context_shift: bool,
                 guesser: Guesser | None, n_draft: int):
        self.ctx, self.vocab, self.shelf, self.full, self.context_shift = ctx, vocab, shelf, full, context_shift
        self.adapters: Adapters = ctx.adapters          # of tasks that name none
        back = ctx.cparams.n_rollback if ctx.memory.rs is not None else n_draft
        self.guesser, self.n_draft = guesser, min(n_draft, back)
        if guesser is not None and self.n_draft < 1:
            env.log("no tokens are guessed: the recurrent state of this model cannot go back (n_rollback is 0)")
            self.guesser = None

    def fill(self, slots: Sequence[Slot], guess: bool) -> tuple[Batch, list[Part]]:
        """The next round's batch; with no guesses where they found no room."""
        active = self._alike(sorted((s for s in slots if s.task), key=lambda s: s.task.number if s.task else 0))
        known = [s for s in slots if s.task is None or s in active]
        for slot in active:         # before anything is queued: slots share what memory has
            if slot.task and slot.task.fresh and not slot.task.waits:
                slot.begin(known, self.shelf)
        ready = [(s, s.task) for s in active if s.task and not s.task.fresh and not s.task.waits]
        batch, parts = Batch(), list[Part]()
        writing = [(s, t) for s, t in ready if t.generating and len(s.pending) == 1 and self._goes_on(s, t)]
        for (slot, _), guesses in zip(writing, self._guesses(writing) if guess else [[] for _ in writing]):
            n = 1 + len(guesses)
            slot.history.queue(batch, [*slot.pending, *guesses], outputs=n)
            parts.append(Part(slot, n, n, guesses))
        cp = self.ctx.cparams
        room = min(max(cp.n_ubatch - len(batch), 1), cp.n_batch - len(batch))
        for slot, task in ready:
            if room and slot.task is task and slot.pending:
                room -= self._queue_prompt(slot, task, batch, parts, room)
        return batch, parts

    def adapters_of(self, task: Task) -> Adapters:
        """Those that are not off."""
        given = task.request.adapters
        return self.adapters if given is None else [(a, scale) for a, scale in given if scale]

    def _alike(self, active: Sequence[Slot]) -> list[Slot]:
        """Slots that can be computed together, as their tasks have the same adapters, which are then on. Where there are several
        such groups, they take turns."""
        groups = list[tuple[Adapters, list[Slot]]]()
        for slot in active:
            adapters = self.adapters_of(slot.task) if slot.task else ()
            group = next((group for known, group in groups if known == adapters), None)
            if group is None:
                groups.append((adapters, [slot]))
            else:
                group.append(slot)
        if not groups:
            return []
        last = next((i for i, (adapters, _) in enumerate(groups) if adapters == self.ctx.adapters), -1)
        adapters, group = groups[(last + 1) % len(groups)]
        if adapters != self.ctx.adapters:
            self.ctx.set_adapters(adapters)
        return group

    def _queue_prompt(self, slot: Slot, task: Task, batch: Batch, parts: list[Part], room: int) -> int:
        scored = task.request.prompt_logprobs is not None and len(task.prompt_logprobs) + 1 < task.n_prompt
        pending = slot.pending
        part = pending[:min(room, SCORED_ROWS) if scored else room]
        if (stop := task.next_stop(len(slot.tokens))) is not None:
            part = part[:stop - len(slot.tokens)]
        if not task.generating and task.n_cached == len(slot.tokens):
            task.progress(len(slot.tokens))
        outputs = len(part) if scored else int(len(part) == len(pending))
        slot.history.queue(batch, part, outputs)
        parts.append(Part(slot, len(part), outputs, scored=scored))
        return len(part)

    def _goes_on(self, slot: Slot, task: Task) -> bool:
        """The last cell stays free, as in llama.cpp; without context shift the text ends before it."""
        if len(slot.tokens) + 1 < slot.history.n_ctx:
            return True
        if not self.context_shift:
            task.finish("length", "context")
            self.full(slot, task)
            return False
        n_keep = task.request.n_keep
        n_keep = n_keep + self.vocab.add_bos if 0 <= n_keep <= task.n_prompt else task.n_prompt
        pending = slot.pending
        slot.history.shift(n_keep, task.request.n_discard)
        task.target = slot.tokens + pending
        task.truncated = True
        return True

    # --- guesses

    def _guesses(self, writing: Sequence[tuple[Slot, Task]]) -> list[list[int]]:
        """For each slot; together they leave the batch within an ubatch. Guessing that fails costs nothing but the guesses."""
        if self.guesser is None or not writing:
            return [[] for _ in writing]
        cp = self.ctx.cparams
        share = min(cp.n_ubatch, cp.n_batch) // len(writing) - 1
        asked = [Ask(s.id, [*s.tokens, *s.pending], min(self.n_draft, share, s.history.n_ctx - len(s.tokens) - 2, t.n_left - 1),
                     t.sampler.clone) for s, t in writing]
        open_ = [i for i, ask in enumerate(asked) if ask.n > 0]
        try:
            found = dict(zip(open_, self.guesser.propose([asked[i] for i in open_]) if open_ else []))
        except Aborted:
            found = {}
        except Exception as e:
            env.log(f"guessing failed, so there are no guesses in this round: {type(e).__name__}: {e}")
            found = {}
        return [self._known(found.get(i, [])) for i in range(len(writing))]

    def _known(self, guesses: Iterable[int]) -> list[int]:
        """Up to the first that the model has no token for."""
        known = list[int]()
        for token in guesses:
            if not 0 <= token < self.ctx.model.n_vocab:
                break
            known.append(token)
        return known
