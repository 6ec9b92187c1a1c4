"""llama-embed: Llama as an embedding model: its tokens all see each other, and there is no output head."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.hparams import HParams

from .llama import graph, weights
from .llama import hparams as llama_hparams

__all__ = ["graph", "hparams", "weights"]


def hparams(kv: Mapping[str, Any]) -> HParams:
    return llama_hparams(kv).replace(cache=False, head=False)
