"""qwen3vl: Qwen 3 VL, text; qwen3 with positions of several axes."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.hparams import HParams
from ggraph.ops import IMROPE

from .qwen3 import graph, weights

__all__ = ["graph", "hparams", "weights"]


def hparams(kv: Mapping[str, Any]) -> HParams:
    return HParams.read(kv, rope_mode=IMROPE)
