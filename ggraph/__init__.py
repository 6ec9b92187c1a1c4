"""ggraph runs a language model straight from a GGUF file.

Read the modules in the order in which one token lives (docs/ARCHITECTURE.md has a line for each):

    what is on disk      dtypes, quants, gguf, hparams, weights, adapters, model
    text -> ids          vocab, chat
    ids -> batch         batch, memory
    batch -> graph       tensor, ops, graph, inputs, build, models
    graph -> plan        schedule, backend, backends
    plan -> logits       context
    logits -> text       sampling, grammar, generate, serve

Public names are loaded on first use, so `import ggraph` costs next to nothing.
"""
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ggraph.errors import (
    Aborted,
    ArgumentError,
    BackendError,
    BatchError,
    ContextFull,
    Error,
    GGUFError,
    GrammarError,
    ModelError,
    PlacementError,
    SamplerError,
    TemplateError,
    VocabError,
)

if TYPE_CHECKING:
    from ggraph.adapters import Adapter
    from ggraph.backend import Finding
    from ggraph.batch import Batch
    from ggraph.chat import ChatTemplate
    from ggraph.context import Context
    from ggraph.diagnosis import diagnose
    from ggraph.fit import memory_needed
    from ggraph.generate import LLM, Generation, ModelDraft, MtpDraft, Nextn, NgramDraft, TokenLogprob
    from ggraph.grammar import Grammar
    from ggraph.hook import STOP, Hook
    from ggraph.hub import HubError
    from ggraph.model import Model, audit
    from ggraph.observe import Observed
    from ggraph.sampling import ReasoningBudget, Sampler, default_chain
    from ggraph.serve import (
        Done,
        EachAlone,
        Embedder,
        Engine,
        Failed,
        FirstOf,
        ModelGuesser,
        Piece,
        Progress,
        Request,
        Times,
        sampling_defaults,
    )
    from ggraph.vocab import Vocab

__version__ = "0.1.0"

__all__ = [
    "Aborted",
    "Adapter",
    "ArgumentError",
    "BackendError",
    "Batch",
    "BatchError",
    "ChatTemplate",
    "Context",
    "ContextFull",
    "Done",
    "EachAlone",
    "Embedder",
    "Engine",
    "Error",
    "Failed",
    "Finding",
    "FirstOf",
    "GGUFError",
    "Generation",
    "Grammar",
    "GrammarError",
    "Hook",
    "HubError",
    "LLM",
    "Model",
    "ModelDraft",
    "ModelError",
    "ModelGuesser",
    "MtpDraft",
    "Nextn",
    "NgramDraft",
    "Observed",
    "Piece",
    "PlacementError",
    "Progress",
    "ReasoningBudget",
    "Request",
    "STOP",
    "Sampler",
    "SamplerError",
    "TemplateError",
    "Times",
    "TokenLogprob",
    "Vocab",
    "VocabError",
    "__version__",
    "audit",
    "default_chain",
    "diagnose",
    "memory_needed",
    "sampling_defaults",
]

_HOME = {
    "Adapter": "adapters",
    "Batch": "batch",
    "ChatTemplate": "chat",
    "Context": "context",
    "Done": "serve",
    "EachAlone": "serve",
    "Embedder": "serve",
    "Engine": "serve",
    "Failed": "serve",
    "Finding": "backend",
    "FirstOf": "serve",
    "Generation": "generate",
    "Grammar": "grammar",
    "Hook": "hook",
    "HubError": "hub",
    "LLM": "generate",
    "Model": "model",
    "ModelDraft": "generate",
    "ModelGuesser": "serve",
    "MtpDraft": "generate",
    "Nextn": "generate",
    "NgramDraft": "generate",
    "Observed": "observe",
    "Piece": "serve",
    "Progress": "serve",
    "ReasoningBudget": "sampling",
    "Request": "serve",
    "STOP": "hook",
    "Sampler": "sampling",
    "Times": "serve",
    "TokenLogprob": "generate",
    "Vocab": "vocab",
    "audit": "model",
    "default_chain": "sampling",
    "diagnose": "diagnosis",
    "memory_needed": "fit",
    "sampling_defaults": "serve",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ggraph' has no attribute {name!r}")
    value = getattr(import_module(f"ggraph.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
