"""Speculative decoding: guess the next tokens cheaply, evaluate all in one run, keep those that the sampler takes anyway.

In: a text's History, a drafter, the text's own sampler. Out: rows of logits as plain decoding would have them, so that the text
is the same to the token. A draft is judged by sampling from the model's row before each of its tokens and comparing.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ..context import Context
from ..errors import Error, ModelError
from ..model import Model
from ..sampling import Sampler
from ..vocab import Vocab
from .history import History

N_FIRST, N_MORE = 5, 128            # as llama.cpp: the first tokens may differ in their texts, and the sizes by so much
TOP = 10                            # a draft's probability is one among the so many likeliest tokens


class Drafter(Protocol):
    def propose(self, tokens: Sequence[int], n: int, sampler: Sampler) -> list[int]:
        """At most n tokens that may follow. `sampler` is a twin of the text's own, to be used up."""

    def abort(self) -> None:
        """Stop a running `propose` soon, from another thread; it raises `Aborted`."""


class NgramDraft:
    """Guesses that the text repeats itself: it looks for where its last tokens stood before, at most `size_n` and at least
    `least` of them, and proposes the `size_m` tokens that came then, over and over if the text ends before."""

    def __init__(self, size_n: int = 12, size_m: int = 48, least: int = 3):
        self.size_n, self.size_m, self.least = size_n, size_m, min(least, size_n)

    def propose(self, tokens: Sequence[int], n: int, sampler: Sampler) -> list[int]:
        text = np.asarray(tokens, np.int32)
        ends, found = np.arange(1, len(text)), None         # where what stood before may have ended
        for length in range(1, self.size_n + 1):
            ends = ends[ends >= length]
            ends = ends[text[ends - length] == text[-length]]
            if not len(ends):
                break
            found = int(ends[-1]) if length >= self.least else None
        return [] if found is None else np.resize(text[found:], min(n, self.size_m)).tolist()

    def abort(self) -> None:
        """There is nothing to wait for."""


class ModelDraft:
    """Guesses with a smaller model, whose `history` follows the text. It draws as the text's sampler would, with the same random
    numbers, and stops before a token of less probability than `p_min`; less than `n_min` tokens are not worth a run.
    """

    def __init__(self, ctx: Context | History, *, n_min: int = 0, p_min: float = 0.0):
        self.history = ctx if isinstance(ctx, History) else History(ctx)
        self.n_min, self.p_min = n_min, p_min
        self._fits: Vocab | None = None

    def check(self, vocab: Vocab) -> None:
        """`ModelError` if this is not the vocabulary, by llama.cpp's rule."""
        if self._fits is not vocab:
            model = self.history.ctx.model
            if why := _difference(vocab, model.vocab):
                raise ModelError(f"{model.path.name} cannot draft for this model, whose vocabulary is another: {why}")
            self._fits = vocab

    def propose(self, tokens: Sequence[int], n: int, sampler: Sampler) -> list[int]:
        history, known = self.history, self.history.ctx.model.n_vocab
        n = min(n, history.n_ctx - len(tokens))
        if n < max(self.n_min, 1) or max(tokens) >= known:
            return []

        news = list(tokens[history.reuse(tokens):-1])

        def row(token: int) -> np.ndarray:
            history.add([*news, token])
            news.clear()
            logits: np.ndarray = history.ctx.logits[-1]
            return logits
        drafted = guess(row, tokens[-1], n, sampler, history.ctx.model, self.p_min)
        return drafted if len(drafted) >= self.n_min else []

    def abort(self) -> None:
        self.history.ctx.abort()


def guess(row: Callable[[int], np.ndarray], token: int, n: int, sampler: Sampler, model: Model, p_min: float = 0.0) -> list[int]:
    """At most n tokens after `token`, drawn one by one from `row(token)`, the logits after it, until the text ends or one is less
    probable than `p_min`."""
    drafted: list[int] = []
    while len(drafted) < n and token < model.n_vocab and not model.vocab.is_eog(token):
        logits = fitted(row(token), sampler.n_vocab)
        token = sampler.sample(logits)
        if p_min > 0 and probability(logits, token) < p_min:
            break
        sampler.accept(token)
        drafted.append(token)
    return drafted


def _difference(a: Vocab, b: Vocab) -> str:
    if a is b:
        return ""
    for what in ("kind", "add_bos", "add_eos", "bos", "eos"):
        if (x := getattr(a, what)) != (y := getattr(b, what)):
            return f"{what} {x} and {y}"
    if abs(a.n_vocab - b.n_vocab) > N_MORE:
        return f"{a.n_vocab} and {b.n_vocab} tokens"
    texts = range(N_FIRST, min(a.n_vocab, b.n_vocab)) if a.kind not in ("none", "test") else ()
    return next((f"token {i} is {a.text(i)!r} and {b.text(i)!r}" for i in texts if a.text(i) != b.text(i)), "")


def fitted(row: np.ndarray, n: int) -> np.ndarray:
    """Logits [n_vocab] for a sampler of n tokens; those that the row does not know are impossible."""
    return row[:n] if len(row) >= n else np.append(row, np.full(n - len(row), -np.inf, np.float32))


def probability(row: np.ndarray, token: int) -> float:
    """Of a token, among the likeliest."""
    top = np.partition(row, -min(TOP, len(row)))[-TOP:]
    return float(np.exp(row[token] - top.max()) / np.exp(top - top.max()).sum())


class Speculation:
    """Evaluates a text's next token together with `n_draft` guesses at most; with recurrent layers, no more than the Context's
    n_rollback, and where that is 0 a wrong guess costs a run over the whole text.

    `ahead` are those guesses that memory holds and the sampler has not come to; `row` are the logits for the next token.
    `n_drafted` and `n_accepted` count guesses; those that stood behind the end of the text are not counted.
    """

    def __init__(self, history: History, drafter: Drafter | None = None, n_draft: int = 0):
        if isinstance(drafter, ModelDraft):
            if drafter.history.ctx is history.ctx:
                raise Error("a text cannot be guessed in its own context; use another one, or the model (draft=llm.model)")
            drafter.check(history.ctx.model.vocab)
        back = history.ctx.cparams.n_rollback if history.ctx.memory.rs is not None else 0
        self.history, self.drafter, self.n_draft = history, drafter, min(n_draft, back or n_draft)
        self.ahead: list[int] = []
        self.n_drafted = self.n_accepted = 0

    @property
    def row(self) -> Any:
        """Logits [n_vocab] for the next token."""
        return self.history.ctx.logits[-1 - len(self.ahead)]

    def judge(self, token: int) -> bool:
        """The sampler took this token: was it the next guess, evaluated already? If not, all guesses are taken back."""
        if not self.ahead:
            return False
        if self.ahead[0] != token:
            self._take_back()
            return False
        del self.ahead[0]
        self.n_accepted += 1
        return True

    def _take_back(self) -> None:
        n, self.ahead = len(self.ahead), []
        self.history.take_back(n)

    def draft(self, token: int, n: int, sampler: Sampler) -> list[int]:
        """At most n guesses at what follows the text and `token`."""
        history = self.history
        n = min(n, self.n_draft, history.n_ctx - len(history.tokens) - 2, history.ctx.cparams.n_ubatch - 1)
        if self.drafter is None or n < 1:
            return []
        drafted = self.drafter.propose([*history.tokens, token], n, sampler.clone())
        known = history.ctx.model.n_vocab
        return drafted[:next((i for i, t in enumerate(drafted) if t >= known), n)]

    def evaluate(self, token: int, drafted: list[int]) -> None:
        """One run over the token and the guesses, with logits after each; a failed one changes nothing."""
        self.history.process([token, *drafted], outputs=1 + len(drafted))
        self.ahead, self.n_drafted = drafted, self.n_drafted + len(drafted)

    def end(self) -> None:
        """The text is complete: memory shall hold what plain decoding had left there."""
        n, self.ahead = len(self.ahead), []
        self.n_drafted -= n
        self.history.cut(len(self.history.tokens) - n)
