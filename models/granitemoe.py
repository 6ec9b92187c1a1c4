"""granitemoe: Granite 3 with experts: granite that always rotates."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.hparams import HParams

from .granite import graph, weights
from .granite import hparams as granite_hparams

__all__ = ["graph", "hparams", "weights"]


def hparams(kv: Mapping[str, Any]) -> HParams:
    return granite_hparams(kv).replace(rope_layers=())
