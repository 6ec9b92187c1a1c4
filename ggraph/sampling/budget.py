"""In: generated tokens. Out: a limit on thoughts, as a constraint of `Sampler`: their end is forced. Knows no chain."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from types import NoneType

import numpy as np
from numpy.typing import NDArray

from ggraph.errors import SamplerError, expect, flags, integer, texts
from ggraph.sampling.chain import Grammar
from ggraph.sampling.dry import Vocabulary


class ReasoningBudget:
    """Behind each `start`, at most `budget` tokens (-1: any number) may come before one of `ends`; then `message` and the first of
    `ends` come, whatever else is likelier. A character is never cut.

    `opened`: the text begins inside a thought. `inner`: a grammar that the whole text follows, which must allow what is forced.
    Marks are found in the text, however it is cut into tokens; none of them may be empty (`SamplerError`).
    """

    def __init__(self, vocab: Vocabulary, start: str, ends: Iterable[str], budget: int, *, message: str = "", opened: bool = False,
                 inner: Grammar | None = None):
        expect("vocab", vocab, Vocabulary, "a Vocab")
        expect("start", start, str, "a text")
        expect("message", message, str, "a text")
        expect("inner", inner, (Grammar, NoneType), "a Grammar")
        flags(opened=opened)
        ends = texts("ends", "an end of ends", ends)
        if not start or not ends or not all(ends):
            raise SamplerError("start and ends mark a thought: none of them may be empty")
        self._vocab, self._start, self._ends = vocab, start.encode(), [end.encode() for end in ends]
        self._forced = _encoded(vocab, message + ends[0])
        self._budget = budget if integer("budget", budget) >= 0 else math.inf
        self._opened, self.inner = opened, inner
        self._begin()

    def _begin(self) -> None:
        self._tail = b""            # of the text, as long as a mark may be
        self._at: int | None = None         # of the token that is forced next
        self._left: float | None = None     # tokens that this thought may still have; None outside of thoughts
        if self._opened:
            self._think()

    def _think(self) -> None:
        self._left = self._budget
        self._run_out()

    def _run_out(self) -> None:
        if self._left is not None and self._left <= 0 and _whole(self._tail):
            self._at = 0

    def finish(self) -> bool:
        """End the thought that is being written, as if the budget were spent; False if there is none, or it is ending already."""
        if self._left is None or self._at is not None:
            return False
        self._left = 0
        self._run_out()
        return True

    def accepts(self, token: int) -> bool:
        if self._at is not None:
            return integer("token", token) == self._forced[self._at]
        return self.inner is None or self.inner.accepts(token)

    def mask(self) -> NDArray[np.bool_]:
        if self._at is None and self.inner is not None:
            return self.inner.mask()
        allowed = np.full(self._vocab.n_vocab, self._at is None)
        if self._at is not None:
            allowed[self._forced[self._at]] = True
        return allowed

    def accept(self, token: int) -> None:
        token = integer("token", token)
        if self.inner is not None:
            self.inner.accept(token)
        self._tail += self._vocab.piece(token)
        if self._at is not None:
            self._at += 1
            if self._at == len(self._forced):
                self._leave()
        elif self._left is None:
            if self._found(self._start):
                self._think()
        elif any(self._found(end) for end in self._ends):
            self._leave()
        else:
            self._left -= 1
            self._run_out()
        self._tail = self._tail[-max(4, *map(len, (self._start, *self._ends))):]

    def _leave(self) -> None:
        self._at = self._left = None
        self._tail = b""

    def _found(self, mark: bytes) -> bool:
        """Takes the mark, and what is before it, out of the tail."""
        _, found, rest = self._tail.partition(mark)
        if found:
            self._tail = rest
        return bool(found)

    def clone(self) -> ReasoningBudget:
        twin = copy.copy(self)
        twin.inner = self.inner.clone() if self.inner is not None else None
        return twin

    def reset(self) -> None:
        if self.inner is not None:
            self.inner.reset()
        self._begin()


def _encoded(vocab: Vocabulary, text: str) -> list[int]:
    """Without the space that some tokenizers put before every text, where it is a token of its own."""
    ids = vocab.encode(text, add_special=False, parse_special=True)
    if not ids:
        raise SamplerError(f"the vocabulary has no token for {text[:40]!r}, which is to end a thought")
    extra = vocab.piece(ids[0]) == b" " and b"".join(map(vocab.piece, ids)) == b" " + text.encode()
    return ids[1:] if extra else ids


def _whole(text: bytes) -> bool:
    """Whether no UTF-8 character is cut at its end."""
    for n in range(1, min(len(text), 3) + 1):
        if text[-n] >= 0xC0:
            return n >= (2 if text[-n] < 0xE0 else 3 if text[-n] < 0xF0 else 4)
        if text[-n] < 0x80:
            return True
    return True
