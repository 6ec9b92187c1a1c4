"""mellum: Mellum 2; experts in every layer, three of four layers with a window and without YaRN."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.hparams import HParams
from ggraph.ops import NEOX

from .qwen3moe import graph, weights

__all__ = ["graph", "hparams", "weights"]


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX, rope_scaling_swa=False, rope_freq_base_swa=0.0)
    return hp.window(hp.keys("attention.sliding_window", 0), hp.swa_pattern(4))
