"""In: seeds and accepted tokens. Out: what a sampler remembers from one token to the next. Knows no logits."""

from __future__ import annotations

import copy
import math
from collections import deque
from typing import Any, TypeVar

import numpy as np

from ggraph.sampling.candidates import f32

S = TypeVar("S", bound="State")


class State:
    """What one sampler of a chain remembers. `clone` must give a twin that goes on alike and shares nothing mutable."""

    def accept(self, token: int) -> None:
        """A token has joined the text."""

    def clone(self: S) -> S:
        return copy.copy(self)


class Random(State):
    """std::mt19937 and the two uniform draws that libstdc++ makes from it."""

    def __init__(self, seed: int):
        self._bits = np.random.MT19937(0)
        seeded: Any = np.random.RandomState(seed).get_state(legacy=False)  # which seeds as std::mt19937 does
        self._bits.state = seeded
        self._ahead: float | None = None

    def ahead(self) -> float:
        """What `uniform` will return."""
        if self._ahead is None:
            low, high = self._bits.random_raw(), self._bits.random_raw()
            self._ahead = min((float(low) + float(high) * 2.0**32) / 2.0**64, math.nextafter(1.0, 0.0))
        return self._ahead

    def uniform(self) -> float:
        """std::uniform_real_distribution<double>(0, 1): two 32-bit draws, the low half first."""
        number, self._ahead = self.ahead(), None
        return number

    def uniform_f32(self) -> f32:
        """std::uniform_real_distribution<float>(0, 1): one 32-bit draw."""
        return min(f32(self._bits.random_raw()) / f32(2.0**32), np.nextafter(f32(1), f32(0)))

    def clone(self: R) -> R:
        twin = copy.copy(self)
        twin._bits = np.random.MT19937(0)
        twin._bits.state = self._bits.state
        return twin


R = TypeVar("R", bound=Random)


class Window(State):
    """The last n accepted tokens, and how often each is among them."""

    def __init__(self, n: int):
        self.recent: deque[int] = deque(maxlen=n)
        self.counts: dict[int, int] = {}

    def accept(self, token: int) -> None:
        if len(self.recent) == self.recent.maxlen:
            oldest = self.recent[0]
            self.counts[oldest] -= 1
            if not self.counts[oldest]:
                del self.counts[oldest]
        self.recent.append(token)
        self.counts[token] = self.counts.get(token, 0) + 1

    def clone(self: W) -> W:
        twin = copy.copy(self)
        twin.recent, twin.counts = self.recent.copy(), self.counts.copy()
        return twin


W = TypeVar("W", bound=Window)


class Surprise(Random):
    """Mirostat: `mu`, the surprise (in bits) up to which a token may be drawn."""

    def __init__(self, seed: int, tau: f32):
        super().__init__(seed)
        self.mu = f32(2) * tau


class Target(Random):
    """adaptive_p: moving average, weighted by decay, of the probabilities that the chosen tokens had."""

    def __init__(self, seed: int, target: f32, decay: f32):
        super().__init__(seed)
        self.decay = min(max(decay, f32(0)), f32(0.99))
        self.sum = target / (f32(1) - self.decay)
        self.weight = f32(1) / (f32(1) - self.decay)
        self.pending: tuple[int, f32] | None = None  # (token, its probability) as drawn, until it is accepted

    def accept(self, token: int) -> None:
        if self.pending and self.pending[0] == token:
            self.sum = self.pending[1] + self.decay * self.sum
            self.weight = f32(1) + self.decay * self.weight
        self.pending = None
