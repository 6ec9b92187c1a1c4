"""One answer in the making: an iterator of text pieces that keeps account.

In: prompt tokens, a History that may hold some of them already, a Sampler. Out: text pieces; tokens, the reason to end,
log-probabilities, timings. It runs one sequence alone; whoever runs several together uses History and Output directly.
"""
from __future__ import annotations

import _thread
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..errors import Aborted, ContextFull, Error, Single, flags, functions, integers
from ..sampling import Sampler
from ..vocab import Vocab
from .drawn import Drawn
from .history import History, Report
from .output import Output, TokenLogprob, logprob
from .speculative import Drafter, Speculation


@dataclass
class Timings:
    """Milliseconds and how many tokens they were for; `cache_n` prompt tokens were still in memory. Of `draft_n` tokens that were
    guessed `draft_n_accepted` were right; guessing is part of `eval_ms`."""
    cache_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    eval_n: int = 0
    eval_ms: float = 0.0
    sample_n: int = 0
    sample_ms: float = 0.0
    draft_n: int = 0
    draft_n_accepted: int = 0

    def add(self, other: Timings) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class Generation(Single, Iterator[str]):
    """Iterate to get the text piece by piece, or `read()` it whole. The work is done while iterating.

    Every piece is whole characters; together they are `text`, which ends before a stop string. `finish_reason` is "stop",
    "length" or "cancelled", None until the end; `stop_type` tells more (see `Output`). `logprobs` has an entry per
    token if asked for. `shifted` counts context shifts. `drafter` guesses at most `n_draft` tokens in a row, on as many branches
    as there are `spare` sequences and one more; it changes nothing but the speed. Errors: `ContextFull` at once if the prompt is
    too long. `text`: what the encoder of a model of two parts takes, before the decoder begins with the prompt.
    """

    instead = "keep its text and tokens"

    def __init__(self, history: History, vocab: Vocab, prompt: Sequence[int], sampler: Sampler, *, max_tokens: int = -1,
                 stop: str | Iterable[str] = (), logprobs: int | None = None, special: bool = False,
                 context_shift: bool = False, n_keep: int = 0, progress: Report | None = None,
                 drafter: Drafter | None = None, n_draft: int = 0, spare: Sequence[int] = (), text: Sequence[int] = ()):
        integers(max_tokens=max_tokens, n_keep=n_keep, n_draft=n_draft, logprobs=0 if logprobs is None else logprobs)
        flags(special=special, context_shift=context_shift)
        functions(progress=progress)
        if not prompt:
            raise Error("the prompt is empty, and this tokenizer adds no token of its own; give at least one token")
        if len(prompt) >= history.n_ctx:
            raise ContextFull(f"the prompt has {len(prompt)} tokens, the context holds {history.n_ctx} and one must stay "
                              "free; shorten the prompt or raise n_ctx")
        self.prompt = list(prompt)
        self.sampler = sampler
        self.output = Output(vocab, max_tokens, stop, special)
        self.logprobs: list[TokenLogprob] = []
        self.timings = Timings()
        self.shifted = 0
        self._encoded = list(text)
        self._history, self._ahead = history, Speculation(history, drafter, n_draft, spare)
        self._drawn = Drawn.of(history, sampler) if drafter is None and logprobs is None else None
        self._n_top, self._progress = logprobs, progress
        n_keep = n_keep + vocab.add_bos if 0 <= n_keep <= len(prompt) else len(prompt)
        self._n_keep = n_keep if context_shift else None
        self._pieces = self._run()
        self._stopped = self._busy = False

    @property
    def text(self) -> str:
        """All pieces so far."""
        return self.output.text

    @property
    def tokens(self) -> list[int]:
        """All tokens so far, with the one that ended the text."""
        return self.output.tokens

    @property
    def finish_reason(self) -> str | None:
        return self.output.finish_reason

    @property
    def stop_type(self) -> str | None:
        return self.output.stop_type

    @property
    def stopping_word(self) -> str | None:
        """The stop string that ended the text."""
        return self.output.stops.found

    def __next__(self) -> str:
        return next(self._pieces)

    def read(self) -> str:
        """Run to the end; the whole text."""
        for _ in self:
            pass
        return self.text

    def stop(self) -> None:
        """End soon, as "cancelled"; from any thread, and from a signal handler."""
        self._stopped = True
        _thread.start_new_thread(self._abort, ())

    def _abort(self) -> None:
        """A thread's work: `abort` may wait for a lock that the interrupted thread holds, and is lost between two runs."""
        while self._busy:
            self._history.ctx.abort()
            if self._ahead.drafter is not None:
                self._ahead.drafter.abort()
            time.sleep(0.01)

    def _run(self) -> Iterator[str]:
        try:
            self._read_prompt()
            while self.finish_reason is None:
                piece = self.output.push(self._sample())
                self._account()
                if piece:
                    yield piece
                if self.finish_reason is None and (piece := self._advance()):
                    yield piece
        except Aborted:
            if not self._stopped:
                raise
            self._ahead.end()
            if piece := self.output.finish("cancelled"):
                yield piece

    def _read_prompt(self) -> None:
        start, t = time.perf_counter(), self.timings
        if self._encoded:
            self._encode()
        t.cache_n = self._history.reuse(self.prompt)
        self._turn = self._history.turn
        for token in self.prompt:       # whatever was kept: the answer must not depend on it
            self.sampler.accept(token, generated=False)
        try:
            self._evaluate(self.prompt[t.cache_n:])
        finally:
            n = len(self._encoded) + len(self._history.tokens) - t.cache_n
            t.prompt_n, t.prompt_ms = n, 1e3 * (time.perf_counter() - start)
        if self.output.max_tokens == 0:
            self.output.finish("length", "limit")

    def _encode(self) -> None:
        self._busy = True
        try:
            self._history.encode(self._encoded)
        finally:
            self._busy = False

    def _sample(self) -> int:
        start, t = time.perf_counter(), self.timings
        if self._drawn is not None:
            return self._wait(self._drawn)
        row = self._ahead.row
        token = self.sampler.sample(row)
        self.sampler.accept(token)
        if self._n_top is not None:
            self.logprobs.append(logprob(row, token, self._n_top))
        t.sample_n, t.sample_ms = t.sample_n + 1, t.sample_ms + 1e3 * (time.perf_counter() - start)
        return token

    def _wait(self, drawn: Drawn) -> int:
        """The token that the device drew; the next one is begun before, unless this is the last."""
        start, t, self._busy = time.perf_counter(), self.timings, True
        try:
            token = drawn.token(more=self.output.max_tokens < 0 or len(self.tokens) + 1 < self.output.max_tokens)
        finally:
            self._busy = False
        t.sample_n, t.eval_n, t.eval_ms = t.sample_n + 1, t.eval_n + drawn.ahead, t.eval_ms + 1e3 * (time.perf_counter() - start)
        return token

    def _account(self) -> None:
        if self.finish_reason is not None:
            self._ahead.end()
            if self._drawn is not None:
                self._drawn.end()
        self.timings.draft_n, self.timings.draft_n_accepted = self._ahead.n_drafted, self._ahead.n_accepted

    def _advance(self) -> str:
        """Evaluate the last token, unless a right guess was it, where there is room for it; else end, with the text that was
        held back."""
        start, t = time.perf_counter(), self.timings
        if self._history.turn != self._turn:
            raise Error("another text was begun in this context; finish one generation before the next")
        self._report(0, 1)
        if self._drawn is not None and self._drawn.ahead:
            return ""
        if self._ahead.judge(self.tokens[-1]):
            t.eval_n += 1
            return ""
        if len(self._history.tokens) + 1 >= self._history.n_ctx:        # the last cell stays free, as in llama.cpp
            if self._n_keep is None:
                return self.output.finish("length", "context")
            self._history.shift(self._n_keep)
            self.shifted += 1
        self._evaluate_last()
        t.eval_n, t.eval_ms = t.eval_n + 1, t.eval_ms + 1e3 * (time.perf_counter() - start)
        return ""

    def _evaluate(self, tokens: Sequence[int]) -> None:
        self._busy = True
        try:
            self._report(0, len(tokens))
            (self._drawn or self._history).add(tokens, self._report)
        finally:
            self._busy = False

    def _evaluate_last(self) -> None:
        self._busy = True
        try:
            if self._drawn is not None:
                self._drawn.add(self.tokens[-1:])
                return
            left = self.output.max_tokens - len(self.tokens) - 1 if self.output.max_tokens >= 0 else self._history.n_ctx
            drafted = self._ahead.draft(self.tokens[-1], left, self.sampler)
            self._report(0, 1)
            self._ahead.evaluate(self.tokens[-1], drafted)
            self._report(1, 1)
        finally:
            self._busy = False

    def _report(self, done: int, total: int) -> None:
        if self._progress and total > 1:
            self._progress(done, total)
        if self._stopped:
            raise Aborted("the generation was stopped")
