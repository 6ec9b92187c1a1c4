"""Guesses at what slots will write next, for all of them together; the engine's model then judges them in one run.

In: texts so far. Out: a few tokens for each, right or wrong. Must not know: slots, tasks, batches of the engine.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ..batch import Batch
from ..context import Context
from ..errors import ContextFull, Error, expect, integers, numbers
from ..generate import Drafter, History, ModelDraft
from ..generate.speculative import fitted, probability
from ..sampling import Sampler


def _each(what: str, values: Any, kind: type) -> None:
    expect(what, values, (list, tuple), f"a list of {what}")
    for value in values:
        expect(f"one of {what}", value, kind, f"a {kind.__name__.lower()}")
    if not values:
        raise Error(f"{what} is empty; give at least one")


@dataclass
class Ask:
    """At most `n` tokens are wanted that may follow `tokens`, the text of sequence `seq`; `twin` gives a copy of its sampler,
    to be used up."""
    seq: int
    tokens: list[int]
    n: int
    twin: Callable[[], Sampler]


@runtime_checkable
class Guesser(Protocol):
    def propose(self, asked: Sequence[Ask]) -> list[list[int]]:
        """For each at most so many tokens as asked, none where there is no guess. It must not take much longer than one ubatch."""

    def abort(self) -> None:
        """Stop a running `propose` soon, from another thread; it raises `Aborted`."""


class EachAlone:
    """One `Drafter` for each sequence, or one for all where it remembers nothing."""

    def __init__(self, drafters: Sequence[Drafter]):
        _each("drafters", drafters, Drafter)
        self.drafters = drafters

    def propose(self, asked: Sequence[Ask]) -> list[list[int]]:
        return [self.drafters[a.seq % len(self.drafters)].propose(a.tokens, a.n, a.twin()) for a in asked]

    def abort(self) -> None:
        for drafter in self.drafters:
            drafter.abort()


class FirstOf:
    """The first of several guessers that has a guess."""

    def __init__(self, guessers: Sequence[Guesser]):
        _each("guessers", guessers, Guesser)
        self.guessers = guessers

    def propose(self, asked: Sequence[Ask]) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in asked]
        for guesser in self.guessers:
            open_ = [i for i, guesses in enumerate(found) if not guesses]
            for i, guesses in zip(open_, guesser.propose([asked[i] for i in open_]) if open_ else []):
                found[i] = guesses
        return found

    def abort(self) -> None:
        for guesser in self.guessers:
            guesser.abort()


@dataclass
class _Text:
    """A text that is being guessed on: what its sequence has still to evaluate, and the guesses so far."""
    ask: Ask
    history: History
    sampler: Sampler
    news: list[int]
    guesses: list[int] = field(default_factory=list)


class ModelGuesser:
    """A smaller model of the same vocabulary, whose Context has a sequence for each of the engine's. All texts are guessed on
    together, one token of each in a run. What a text is behind is evaluated first, an ubatch in all texts together and a call;
    until that is done it gets no guesses. `n_min`, `p_min`: see `ModelDraft`.
    """

    def __init__(self, ctx: Context, *, n_min: int = 0, p_min: float = 0.0):
        expect("ctx", ctx, Context, "a Context")
        integers(n_min=n_min)
        numbers(p_min=p_min)
        self.ctx, self.n_min, self.p_min = ctx, n_min, p_min
        self._histories = [History(ctx, seq) for seq in range(ctx.n_seq_max)]

    def check(self, ctx: Context) -> None:
        """`ModelError` if it cannot guess for this context's model, `Error` where it has too few sequences."""
        expect("ctx", ctx, Context, "a Context")
        ModelDraft(self._histories[0]).check(ctx.model.vocab)
        if self.ctx.n_seq_max < ctx.n_seq_max:
            raise Error(f"the draft model's context has {self.ctx.n_seq_max} sequences, {ctx.n_seq_max} are needed (n_seq_max)")

    def propose(self, asked: Sequence[Ask]) -> list[list[int]]:
        try:
            return self._propose(asked)
        except ContextFull:             # its pool has no cells to share: those who write now start anew, next time
            for history in self._histories:
                history.clear()
            return [[] for _ in asked]
        except BaseException:
            for history in self._histories:
                history.settle()
            raise

    def _propose(self, asked: Sequence[Ask]) -> list[list[int]]:
        texts = {i: text for i, ask in enumerate(asked) if (text := self._text(ask))}
        running = self._caught_up(list(texts.values()))
        while running:
            running = [text for text, row in zip(running, self._run(running)) if self._goes_on(text, row)]
        found = [texts[i].guesses if i in texts else [] for i in range(len(asked))]
        return [guesses if len(guesses) >= self.n_min else [] for guesses in found]

    def _text(self, ask: Ask) -> _Text | None:
        history = self._histories[ask.seq]
        ask.n = min(ask.n, history.n_ctx - len(ask.tokens))
        if ask.n < max(self.n_min, 1) or max(ask.tokens) >= self.ctx.model.n_vocab:
            return None
        return _Text(ask, history, ask.twin(), list(ask.tokens[history.reuse(ask.tokens):]))

    def _caught_up(self, texts: list[_Text]) -> list[_Text]:
        """Those that lack but their last token, once an ubatch of what the others lack is evaluated."""
        room, batch = self.ctx.cparams.n_ubatch, Batch()
        for text in texts:
            part, text.news = text.news[:min(room, len(text.news) - 1)], text.news[min(room, len(text.news) - 1):]
            room -= len(part)
            text.history.queue(batch, part, outputs=0)
        if len(batch):
            self.ctx.process("decode", batch)
        return [text for text in texts if len(text.news) == 1]

    def _run(self, texts: list[_Text]) -> list[object]:
        batch = Batch()
        for text in texts:
            text.history.queue(batch, text.news)
        self.ctx.process("decode", batch)
        return list(self.ctx.logits)

    def _goes_on(self, text: _Text, logits: object) -> bool:
        """Draw the next guess from a row of logits; whether there is to be another."""
        row = fitted(logits, text.sampler.n_vocab)  # type: ignore[arg-type]
        token = text.sampler.sample(row)
        if self.p_min > 0 and probability(row, token) < self.p_min:
            return False
        text.guesses.append(token)
        model = self.ctx.model
        if len(text.guesses) == text.ask.n or token >= model.n_vocab or model.vocab.is_eog(token):
            return False
        text.sampler.accept(token)
        text.news = [token]
        return True

    def abort(self) -> None:
        self.ctx.abort()
