"""A token drawn where the logits are: what a graph that ends in one reads, and where it leaves it for the next.

In: a chain of samplers as steps of `ops.sample`, random numbers. Out: a token that stays on the device, and a way to read it. It
knows no graph and no sampler.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .backend import Device
from .ops import SAMPLE
from .tensor import I32, leaf

MAX_STEPS = 8


class Drawing:
    """Of one sequence. `chained`: the next batch begins with the token that was drawn last, whatever its id says."""

    def __init__(self, device: Device):
        self.device, self.chained = device, False
        self.token = leaf(I32, (1,), "drawn_token")
        self.steps = np.zeros((MAX_STEPS, 2), np.float32)
        self.uniform = np.zeros((1, 2), np.int32)
        self.pending: Callable[[], np.ndarray] | None = None        # waits for the token of the last step that was begun

    def take(self, steps: Sequence[tuple[str, float]]) -> None:
        """The chain to use, in words of `ops.SAMPLE`; at most MAX_STEPS."""
        self.steps[:] = 0
        for i, (word, value) in enumerate(steps):
            self.steps[i] = SAMPLE[word], value

    def draw(self, uniform: float) -> None:
        """The random number of the next token, from 0 to below 1."""
        self.uniform[0] = np.array([int(uniform * 2.0**64)], np.uint64).view(np.int32)

    def key(self) -> tuple[str, bool]:
        return "drawn", self.chained

    def alloc(self) -> None:
        self.token.buffer = self.device.alloc(int(self.token.nbytes))

    def free(self) -> None:
        self.device.free(self.token.buffer)
