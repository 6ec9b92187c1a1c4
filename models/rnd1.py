"""rnd1: RND1, a diffusion model: qwen3moe whose tokens see both ways, within their batch."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.hparams import HParams
from ggraph.ops import NEOX

from .qwen3moe import graph, weights

__all__ = ["graph", "hparams", "weights"]


def hparams(kv: Mapping[str, Any]) -> HParams:
    return HParams.read(kv, rope_mode=NEOX, causal=False, cache=False)
