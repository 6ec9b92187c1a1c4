"""Sampling parameters of a model: llama.cpp's defaults, with the file's own in their place."""
from __future__ import annotations

from typing import Any

from ..errors import expect
from ..generate.llm import own_defaults
from ..model import Model
from ..sampling import DEFAULTS


def sampling_defaults(model: Model) -> dict[str, Any]:
    """Arguments of `ggraph.default_chain`."""
    expect("model", model, Model, "a Model")
    return {**DEFAULTS, **own_defaults(model)}
