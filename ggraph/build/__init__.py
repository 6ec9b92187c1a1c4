"""What architecture files build their graphs from: `Builder`, put together from blocks by family."""
from __future__ import annotations

from .attention import Attention
from .core import Dims
from .moe import Experts


class Builder(Attention, Experts):
    """Handed to an architecture's `graph(b)`: hyperparameters, weights, memory, and every block."""


__all__ = ["Builder", "Dims"]
