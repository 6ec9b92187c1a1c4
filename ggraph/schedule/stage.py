"""What the host fills in goes to a device in one piece: the twins of all inputs lie side by side at the start of its arena.

In: inputs with their twins, arrays. Out: one upload before each run. Offsets are sizes of the batch, so that nothing is sent but
what is there.
"""
from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ..backend import Backend
from ..tensor import Tensor


class Stage:
    """`pairs` are (input, its twin on `backend`)."""

    def __init__(self, backend: Backend, pairs: Sequence[tuple[Tensor, Tensor]]):
        self.backend, self.pairs = backend, pairs
        self.largest = sum(int(twin.nbytes) for _, twin in pairs)
        self.buffer: Any = None
        self.slots: dict[Tensor, np.ndarray | None] = {}            # inputs that are sent, in order

    def settle(self, buffer: Any) -> None:
        """The arena has its memory."""
        self.buffer = buffer
        for _, twin in self.pairs:
            twin.buffer = buffer

    def lay_out(self, reads: Collection[Tensor]) -> Collection[Tensor]:
        """Give an offset to those twins that are read, and return their inputs."""
        offset = 0
        for source, twin in self.pairs:
            if twin in reads:
                twin.offset = offset
                offset = offset + twin.nbytes
                self.slots[source] = None
        return self.slots

    def take(self, source: Tensor, data: np.ndarray) -> None:
        if source in self.slots:
            self.slots[source] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)

    def send(self) -> None:
        if self.slots:
            self.backend.upload(self.buffer, 0, np.concatenate([data for data in self.slots.values() if data is not None]))
