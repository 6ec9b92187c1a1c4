"""What architecture files build their graphs from: `Builder`, put together from blocks by family."""
from __future__ import annotations

from .blocks import ChosenBlocks
from .core import Dims
from .mamba import Mamba
from .mla import LatentAttention
from .moe import Experts
from .nextn import NextToken


class Builder(ChosenBlocks, LatentAttention, Experts, Mamba, NextToken):
    """Handed to an architecture's `graph(b)`: hyperparameters, weights, memory, and every block."""


__all__ = ["Builder", "Dims"]
