"""In: one row of logits. Out: the tokens still in play, which the samplers cut, sort and change. Knows no sampler.

Arithmetic is float32 where llama.cpp's is, sums run from the first to the last candidate as its loops do, and exp and
log are rounded from float64, since NumPy's float32 versions are less exact than libm's.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from ggraph.errors import SamplerError
from ggraph.sampling.order import F32, Ints, largest

__all__ = ["F32", "NEG_INF", "Candidates", "Ints", "exp", "f32", "log", "log2", "total"]

f32 = np.float32
NEG_INF = f32(-np.inf)


def exp(x: F32) -> F32:
    return np.exp(x, dtype=np.float64).astype(f32)


def log(x: Any) -> Any:
    return np.log(x, dtype=np.float64).astype(f32)


def log2(x: Any) -> Any:
    return np.log2(x, dtype=np.float64).astype(f32)


def total(x: F32) -> f32:
    """Sum in float32, one after the other (NumPy's own sum adds in pairs)."""
    result: f32 = np.add.accumulate(x)[-1] if len(x) else f32(0)
    return result


class Candidates:
    """Tokens with their logits, in an order that matters: draws walk it from the front.

    `ids` is None as long as position i is token i. `logits` may be the caller's row: `writable()` copies it once.
    `is_sorted` is llama.cpp's flag: it says that a sampler has sorted, and changing a logit need not clear it.
    `picked` is the position that the last sampler of the chain chose.
    """

    __slots__ = ("_best", "_owned", "ids", "is_sorted", "logits", "n_vocab", "picked")

    def __init__(self, row: F32):
        self.n_vocab = len(row)
        self.ids: Ints | None = None
        self.logits = row
        self.is_sorted = False
        self.picked = -1
        self._owned = False
        self._best: int | None = None

    def __len__(self) -> int:
        return len(self.logits)

    def token(self, i: int) -> int:
        return i if self.ids is None else int(self.ids[i])

    def best(self) -> int:
        """Position of the first highest logit; SamplerError where it is not finite."""
        if self._best is None:
            self._best = int(self.logits.argmax())  # a NaN counts as highest
        self._check(self._best)
        return self._best

    def _check(self, i: int) -> None:
        if self.logits[i] == NEG_INF:
            raise SamplerError("no token is left to choose: every logit is -inf, so all are banned or cut")
        if not np.isfinite(self.logits[i]):
            raise SamplerError(
                f"the logit of token {self.token(i)} is {self.logits[i]}: "
                "look at the model file, a hook that writes to nodes, or a temperature too near 0"
            )

    def find(self, tokens: Collection[int]) -> Ints:
        """Positions of those of `tokens` (no repeats, all < n_vocab) that are still in play."""
        wanted = np.fromiter(tokens, np.intp, len(tokens))
        return wanted if self.ids is None else np.flatnonzero(np.isin(self.ids, wanted))

    def tokens(self, at: Ints) -> list[int]:
        found: list[int] = (at if self.ids is None else self.ids[at]).tolist()
        return found

    def writable(self) -> F32:
        """The logits, for changing in place."""
        if not self._owned:
            self.replace(self.logits.copy())
        self._best = None
        return self.logits

    def replace(self, logits: F32) -> None:
        self.logits = logits
        self._owned = True
        self._best = None

    def keep(self, at: Ints) -> None:
        """Keeps the candidates at these positions, in this order."""
        self.ids = at if self.ids is None else self.ids[at]
        self.replace(self.logits[at])

    def order(self, k: int) -> Ints:
        """Positions of the k highest, highest first."""
        return np.arange(k) if self.is_sorted else largest(self.logits, k)

    def sort(self, k: int | None = None) -> None:
        """Keeps the k highest (all if None), highest first."""
        k = len(self) if k is None else min(k, len(self))
        if k < len(self) or not self.is_sorted:
            self.keep(self.order(k))
            self.is_sorted = True

    def weights(self) -> F32:
        """exp(logit - highest) of every candidate."""
        highest = 0 if self.is_sorted else self.best()
        self._check(highest)
        return exp(self.logits - self.logits[highest])

    def softmax(self) -> F32:
        p = self.weights()
        p /= total(p)
        return p
