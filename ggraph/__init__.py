"""ggraph runs a language model straight from a GGUF file.

Read the modules in the order in which one token lives (docs/ARCHITECTURE.md has a line for each):

    what is on disk      dtypes, quants, gguf, hparams, weights, model
    text -> ids          vocab, chat
    ids -> batch         batch, memory
    batch -> graph       tensor, ops, graph, inputs, build, models
    graph -> plan        schedule, backend, backends
    plan -> logits       context
    logits -> text       sampling, grammar, generate

Public names are loaded on first use, so `import ggraph` costs next to nothing.
"""
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ggraph.errors import (
    Aborted,
    BackendError,
    BatchError,
    ContextFull,
    Error,
    GGUFError,
    ModelError,
    PlacementError,
    SamplerError,
    TemplateError,
    VocabError,
)

if TYPE_CHECKING:
    from ggraph.batch import Batch
    from ggraph.chat import ChatTemplate
    from ggraph.context import STOP, Context, Hook
    from ggraph.generate import LLM, Generation
    from ggraph.hub import HubError
    from ggraph.model import Model
    from ggraph.sampling import Sampler
    from ggraph.vocab import Vocab

__version__ = "0.1.0"

__all__ = [
    "Aborted",
    "BackendError",
    "Batch",
    "BatchError",
    "ChatTemplate",
    "Context",
    "ContextFull",
    "Error",
    "GGUFError",
    "Generation",
    "Hook",
    "HubError",
    "LLM",
    "Model",
    "ModelError",
    "PlacementError",
    "STOP",
    "Sampler",
    "SamplerError",
    "TemplateError",
    "Vocab",
    "VocabError",
    "__version__",
]

_HOME = {
    "Batch": "batch",
    "ChatTemplate": "chat",
    "Context": "context",
    "Generation": "generate",
    "Hook": "context",
    "HubError": "hub",
    "LLM": "generate",
    "Model": "model",
    "STOP": "context",
    "Sampler": "sampling",
    "Vocab": "vocab",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ggraph' has no attribute {name!r}")
    value = getattr(import_module(f"ggraph.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
