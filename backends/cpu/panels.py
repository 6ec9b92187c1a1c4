"""Packed copies of weights: which are wanted, where they are, made once per model.

In: the weights of a model, then requests by address. Out: addresses of panels. A weight that no mat-mul reads is never packed.
"""
from __future__ import annotations

from collections.abc import Sequence

from ggraph.backend import HostBuffer, Progress
from ggraph.tensor import Tensor


class Panels:
    def __init__(self, repack: str = "auto"):
        self.repack = repack
        self.offered: set[Tensor] = set()
        self.buffers: dict[Tensor, HostBuffer] = {}
        self.empty: list[Tensor] = []

    def offer(self, weights: Sequence[Tensor]) -> None:
        """Weights that may be packed."""
        self.offered.update(weights)

    def address(self, weight: Tensor) -> int | None:
        """Where the panels of a weight will be when the split runs; None if it is not to be packed."""
        return None

    def fill(self, progress: Progress | None) -> None:
        """Pack what was asked for since the last call."""

    def close(self) -> None:
        self.buffers.clear()
        self.offered.clear()
