"""Many answers at once from one Context. Reading order: task, prefix, shelf, slot, engine; embedder, defaults.

In: requests (token ids, samplers, limits) from any thread. Out: events, as they happen. Must not know: HTTP, JSON.
"""
from .defaults import sampling_defaults
from .embedder import Embedder
from .engine import Engine
from .task import Done, Event, Failed, Piece, Progress, Request

__all__ = ["Done", "Embedder", "Engine", "Event", "Failed", "Piece", "Progress", "Request", "sampling_defaults"]
