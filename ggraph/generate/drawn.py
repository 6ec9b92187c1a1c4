"""Tokens drawn on the device, one step ahead of the host: while a token is read, the step that begins with it runs already.

In: a History whose Context can draw, the text's sampler. Out: tokens one by one, those that the sampler itself would have drawn but
for rounding. Where a memory cannot give back the last token, no step begins before its token is read.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsInt

from ..drawing import MAX_STEPS, Drawing
from ..errors import SamplerError
from ..sampling import Sampler
from .history import History, Report


def finite(token: SupportsInt) -> int:
    """A token that was drawn. `SamplerError` where there was none to draw."""
    if int(token) < 0:
        raise SamplerError("the highest logit is not finite: look at the model file, or all tokens are banned")
    return int(token)


class Drawn:
    """`ahead`: memory holds the last token already, since the step that begins with it was begun."""

    def __init__(self, history: History, drawing: Drawing, sampler: Sampler):
        self.history, self.drawing, self.sampler = history, drawing, sampler
        self._twin = sampler.clone()                # whose random numbers are taken a step before the sampler's own
        self.ahead = False

    @classmethod
    def of(cls, history: History, sampler: Sampler) -> Drawn | None:
        """None where the chain has words that the device does not know, or the logits are not there."""
        steps = sampler.steps()
        drawing = history.ctx.drawing() if steps is not None and len(steps) <= MAX_STEPS else None
        if drawing is None:
            return None
        drawing.take([steps or []])
        return cls(history, drawing, sampler)

    def add(self, tokens: Sequence[int], report: Report | None = None) -> None:
        """Evaluate the next tokens and draw the one that follows."""
        self.drawing.chained = False
        self.drawing.draw([self._twin.uniform()])
        self.history.add(tokens, report, self.drawing)

    def token(self, more: bool) -> int:
        """The token that was drawn. `more`: its own step is wanted, and is begun before it is read, where that can be undone."""
        read, cp, memory = self.drawing.pending(), self.history.ctx.cparams, self.history.ctx.memory
        self.ahead = False
        if more and (memory.rs is None or cp.n_rollback > 0) and len(self.history.tokens) + 1 < self.history.n_ctx:
            self.drawing.draw([self._twin.uniform()])
            self.history.follow(self.drawing)
            self.ahead = True
        token = finite(read()[0])
        if self.ahead:
            self.history.tokens[-1] = token
        self.sampler.uniform()
        self.sampler.accept(token)
        return token

    def end(self) -> None:
        """The text is complete: memory shall hold what plain decoding had left there."""
        history, n = self.history, len(self.history.tokens) - 1
        if self.ahead and history.ctx.memory.seq_rm(history.seq, n, -1):
            del history.tokens[n:]
        self.ahead = False
