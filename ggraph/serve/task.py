"""What is asked of an engine, and what it tells: requests in, events out; a task is one choice of a request in the making.

Must not know: slots, contexts, threads.
"""
from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..adapters import Adapter
from ..drawing import MAX_STEPS, Chain
from ..errors import Error, at_least, expect, flags, function, integer, integers, numbers, texts
from ..generate import Output, TokenLogprob
from ..generate.drawn import finite
from ..generate.output import logprob
from ..sampling import Sampler
from ..vocab import StreamDecoder, Vocab


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the prompt is; `cache` of its `total` tokens were in memory already."""
    total: int
    cache: int
    processed: int
    ms: float


@dataclass(frozen=True, slots=True)
class Times:
    """How long a choice has taken so far, and for how many tokens; as in `Done`."""
    n_cached: int
    n_evaluated: int
    n_generated: int
    prompt_ms: float
    generated_ms: float
    draft_n: int
    draft_n_accepted: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that has become certain, with the tokens that it was made of. `times`: if asked for."""
    index: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob]
    n_generated: int
    times: Times | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """The end of one choice. `finish_reason`, `stop_type`, `stopping_word`: see `ggraph.Generation`.

    Times in milliseconds; `n_cached` tokens of the prompt were in memory, `n_evaluated` were evaluated. `n_past` tokens are
    in memory now. Of `draft_n` tokens that were guessed `draft_n_accepted` were right. `prompt_logprobs`: for each token of
    the prompt after the first, if asked for.
    """
    index: int
    slot: int
    finish_reason: str
    stop_type: str | None
    stopping_word: str | None
    n_prompt: int
    n_cached: int
    n_evaluated: int
    n_generated: int
    n_past: int
    prompt_ms: float
    generated_ms: float
    truncated: bool
    prompt_logprobs: list[TokenLogprob]
    draft_n: int = 0
    draft_n_accepted: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of a whole request: `error` says why."""
    error: Exception


Adapters: TypeAlias = Sequence[tuple[Adapter, float]]
Event: TypeAlias = Progress | Piece | Done | Failed


@dataclass(eq=False)
class Request:
    """One prompt, to be continued once for each of `samplers`, which must be of their own.

    `sink` is called with each event, on the engine's thread; it must return at once. The last event is `Failed`, or the
    `Done` of the last choice. `logprobs`, `prompt_logprobs`: how many likeliest tokens beside the one chosen; None: no
    log-probabilities; `post_sampling`: of what the samplers left, not of the model. `preserved`: control tokens that are text.
    `n_indent`: see `Output`. `n_keep`, `n_discard`: tokens that a full context keeps, and that it then drops (0: half).
    `time_limit`: ms of generation after which the text ends with the line (0 and less: no limit). `slot`: this one, -1: any.
    `adapters`: exactly these, each with its scale; None: the engine's.
    `cache_reuse`: at least so many tokens that a slot holds are moved to where the prompt has them, -1: the engine's choice.
    `progress`, `timings`: tell how far the prompt is, and times with each piece.
    """
    prompt: Sequence[int]
    samplers: Sequence[Sampler]
    sink: Callable[[Event], None]
    max_tokens: int = -1
    stop: Sequence[str] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    preserved: frozenset[int] = frozenset()
    cache_prompt: bool = True
    cache_reuse: int = -1
    adapters: Adapters | None = None
    slot: int = -1
    n_keep: int = 0
    n_discard: int = 0
    n_indent: int = 0
    time_limit: float = -1.0
    progress: bool = False
    timings: bool = False
    post_sampling: bool = False
    cancelled: bool = field(default=False, init=False)

    def check(self, n_vocab: int) -> None:
        """Error for what makes no sense: found here, it fails nobody else's round."""
        expect("prompt", self.prompt, Sequence, "a list of token ids")
        if bad := next((t for t in self.prompt if not 0 <= integer("a token of prompt", t) < n_vocab), None):
            raise Error(f"the prompt has the token {bad}; the vocabulary has tokens 0 to {n_vocab - 1}")
        expect("samplers", self.samplers, Sequence, "a list of Samplers")
        for sampler in self.samplers:
            expect("one of samplers", sampler, Sampler, "a Sampler")
        function("sink", self.sink)
        texts("stop", "a text of stop", self.stop)
        expect("preserved", self.preserved, AbstractSet, "a set of token ids")
        integers(max_tokens=self.max_tokens, cache_reuse=self.cache_reuse, slot=self.slot, n_keep=self.n_keep,
                 logprobs=0 if self.logprobs is None else self.logprobs,
                 prompt_logprobs=0 if self.prompt_logprobs is None else self.prompt_logprobs)
        at_least(0, n_discard=self.n_discard, n_indent=self.n_indent)
        numbers(time_limit=self.time_limit)
        flags(cache_prompt=self.cache_prompt, progress=self.progress, timings=self.timings, post_sampling=self.post_sampling)

    def tell(self, event: Event) -> None:
        """An event, unless the request was cancelled. A sink that fails has nobody behind it any more."""
        try:
            if not self.cancelled:
                self.sink(event)
        except Exception:
            self.cancelled = True


class _Preserving:
    """A vocabulary whose control tokens are no text but for some."""

    def __init__(self, vocab: Vocab, preserved: frozenset[int]):
        self._vocab, self._preserved = vocab, preserved
        self.is_eog = vocab.is_eog

    def stream_decoder(self, special: bool) -> StreamDecoder:
        return StreamDecoder(lambda id: self._vocab.piece(id, id in self._preserved))


class Task:
    """One choice. `target` are the tokens that its sequence has to hold before the next one is sampled."""

    def __init__(self, request: Request, index: int, number: int, vocab: Vocab):
        self.request, self.index, self.number = request, index, number
        self.sampler = request.samplers[index]
        self.target = list(request.prompt)
        shown = _Preserving(vocab, request.preserved) if request.preserved else vocab
        self.output = Output(shown, request.max_tokens, request.stop, n_indent=request.n_indent)  # type: ignore[arg-type]
        self.prompt_logprobs: list[TokenLogprob] = []
        self.n_cached = -1          # not begun
        self.n_evaluated = 0
        self.truncated = False
        self.primed = False         # the sampler has seen the prompt
        self.cache_reuse = max(request.cache_reuse, 0)
        self.waits = False          # for the choice that evaluates their common prompt
        self.fresh = True           # in its slot nothing was evaluated yet
        self.stops: dict[int, bool] = {}    # positions where evaluation pauses: is the state kept, beyond the next round?
        self.draft_n = self.draft_n_accepted = 0
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._start = self._first = 0.0
        self.drawn: tuple[float, list[tuple[int, float]]] = (1.0, [])

    @property
    def n_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def generating(self) -> bool:
        return bool(self.output.tokens)

    @property
    def n_left(self) -> int:
        """Tokens still to come, at most."""
        n = self.request.max_tokens
        return n - len(self.output.tokens) if n >= 0 else sys.maxsize

    def next_stop(self, n: int) -> int | None:
        """The next position behind n where evaluation pauses."""
        return min((at for at in self.stops if at > n), default=None)

    def begin(self, n_cached: int) -> None:
        """Its slot holds the first `n_cached` tokens. Only the first time counts: later ones repeat what was done."""
        self.fresh = False
        if not self._start:
            self._start, self.n_cached = time.perf_counter(), min(n_cached, self.n_prompt)

    def prime(self) -> None:
        if not self.primed:
            self.primed = True
            for token in self.request.prompt:
                self.sampler.accept(token, generated=False)

    def score(self, rows: npt.NDArray[np.float32], first: int) -> None:
        """Rows of logits for the prompt's tokens from position `first` on: keep what they say of the tokens after them."""
        n_top = self.request.prompt_logprobs
        assert n_top is not None
        for position, row in enumerate(rows, first + 1):
            if len(self.prompt_logprobs) + 1 == position < self.n_prompt:
                self.prompt_logprobs.append(logprob(row, self.request.prompt[position], n_top))

    def progress(self, n_past: int) -> None:
        if self.request.progress and not self.generating:
            ms = 1e3 * (time.perf_counter() - self._start)
            self.request.tell(Progress(self.n_prompt, self.n_cached, min(n_past, self.n_prompt), ms))

    def prompt_done(self) -> None:
        if not self._first:
            self._first = time.perf_counter()

    def chain(self) -> Chain | None:
        """How a device may draw the next token; None where more is asked of it, or of the row of logits."""
        steps = self.sampler.steps() if self.request.logprobs is None else None
        return steps if steps is not None and len(steps) <= MAX_STEPS else None

    def sample(self, row: npt.NDArray[Any]) -> None:
        """Choose the next token by a row of logits, or take that which a device drew (a row without axes), and tell the text that
        it made certain. A stop string's tokens are not told."""
        token = self.sampler.sample(row) if row.ndim else self._take(row)
        if self.request.post_sampling and self.request.logprobs is not None:
            self.drawn = self.sampler.drawn(self.request.logprobs)
        self.sampler.accept(token)
        self.target.append(token)
        piece = self.output.push(token)
        if self.output.stop_type != "eos":
            self._tokens.append(token)
            if self.request.logprobs is not None:
                self._logprobs.append(self._logprob(row, token, self.request.logprobs))
        if piece:
            self._tell(piece)
        limit = self.request.time_limit
        if self.output.finish_reason is None and "\n" in piece and 0 < limit < 1e3 * (time.perf_counter() - self._first):
            self.finish("length", "limit")

    def _take(self, token: npt.NDArray[Any]) -> int:
        self.sampler.uniform()
        return finite(token)

    def _logprob(self, row: npt.NDArray[np.float32], token: int, n_top: int) -> TokenLogprob:
        if not self.request.post_sampling:
            return logprob(row, token, n_top)
        p, top = self.drawn
        return TokenLogprob(token, math.log(p), tuple((t, math.log(q)) for t, q in top))

    def _tell(self, piece: str) -> None:
        tokens, logprobs = self._tokens, self._logprobs
        self._tokens, self._logprobs = [], []
        times = self.times() if self.request.timings else None
        self.request.tell(Piece(self.index, piece, tokens, logprobs, len(self.output.tokens), times))

    def times(self) -> Times:
        now = time.perf_counter()
        first = self._first or now
        return Times(max(self.n_cached, 0), self.n_evaluated, len(self.output.tokens), 1e3 * (first - (self._start or first)),
                     1e3 * (now - first), self.draft_n, self.draft_n_accepted)

    def finish(self, reason: str, stop_type: str) -> None:
        """End the text here."""
        if piece := self.output.finish(reason, stop_type):
            self._tell(piece)

    def done(self, slot: int, n_past: int) -> Done:
        """The last event; before it, tokens that made no text of their own."""
        out, t = self.output, self.times()
        if self._tokens and out.stop_type != "word":
            self._tell("")
        assert out.finish_reason is not None
        return Done(self.index, slot, out.finish_reason, out.stop_type, out.stops.found, self.n_prompt, t.n_cached, t.n_evaluated,
                    t.n_generated, n_past, t.prompt_ms, t.generated_ms, self.truncated or out.stop_type == "context",
                    self.prompt_logprobs, t.draft_n, t.draft_n_accepted)
