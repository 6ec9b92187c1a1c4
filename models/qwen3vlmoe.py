"""qwen3vlmoe: Qwen 3 VL with experts, text; qwen3moe with positions of several axes."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.hparams import HParams
from ggraph.ops import IMROPE

from .qwen3moe import graph, weights

__all__ = ["graph", "hparams", "weights"]


def hparams(kv: Mapping[str, Any]) -> HParams:
    return HParams.read(kv, rope_mode=IMROPE)
