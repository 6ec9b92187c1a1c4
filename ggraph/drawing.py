"""Tokens drawn where the logits are: what a graph that ends in them reads, and where it leaves one for the next.

In: for each output row a chain of samplers as steps of `ops.sample`, and a random number. Out: tokens that stay on the device, and
a way to read them. It knows no graph and no sampler.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .backend import Device
from .ops import SAMPLE
from .tensor import I32, leaf

MAX_STEPS = 8
Chain = Sequence[tuple[str, float]]                 # words of `ops.SAMPLE` with their values, at most MAX_STEPS


class Drawing:
    """Of the output rows of a batch, in batch order. `chained`: the next batch is the token that was drawn last, whatever its id
    says; that batch, and the one before, has one output row."""

    def __init__(self, device: Device):
        self.device, self.chained = device, False
        self.token = leaf(I32, (1,), "drawn_token")
        self.steps = np.zeros((1, MAX_STEPS, 2), np.float32)
        self.uniform = np.zeros((1, 2), np.int32)
        self.rows: np.ndarray = np.zeros(0, np.int64)               # those of the ubatch at hand
        self._drawn: list[tuple[np.ndarray, Callable[[], np.ndarray]]] = []

    def take(self, chains: Sequence[Chain]) -> None:
        """The chain of each row of the next batch."""
        self.steps = np.zeros((len(chains), MAX_STEPS, 2), np.float32)
        for row, chain in zip(self.steps, chains):
            for i, (word, value) in enumerate(chain):
                row[i] = SAMPLE[word], value

    def draw(self, uniform: Sequence[float]) -> None:
        """The random number of each row, from 0 to below 1."""
        self.uniform = np.array([int(u * 2.0**64) for u in uniform], np.uint64).view(np.int32).reshape(-1, 2)

    def begin(self) -> None:
        """A batch begins: what comes now is of this one."""
        self._drawn = []

    def add(self, wait: Callable[[], np.ndarray]) -> None:
        """The tokens of `rows` are being drawn."""
        self._drawn.append((self.rows, wait))

    def pending(self) -> Callable[[], np.ndarray]:
        """What waits for the tokens of the batch that was begun last: int32 [n_outputs], -1 where a row's highest logit is not
        finite. The next batch may be begun before."""
        drawn = self._drawn

        def read() -> np.ndarray:
            tokens = np.zeros(sum(len(rows) for rows, _ in drawn), np.int32)
            for rows, wait in drawn:
                tokens[rows] = wait().view(np.int32)
            return tokens
        return read

    def key(self) -> tuple[str, bool]:
        return "drawn", self.chained

    def alloc(self) -> Drawing:
        self.token.buffer = self.device.alloc(int(self.token.nbytes))
        return self

    def free(self) -> None:
        self.device.free(self.token.buffer)
