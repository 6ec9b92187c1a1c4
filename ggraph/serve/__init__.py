"""Many answers at once from one Context. In reading order: task, prefix, shelf, slot, guess, batcher, waiting, engine.

In: requests (token ids, samplers, limits) from any thread. Out: events, as they happen. Must not know: HTTP, JSON.
"""
from .defaults import sampling_defaults
from .embedder import Embedder
from .engine import Engine
from .guess import EachAlone, FirstOf, Guesser, ModelGuesser
from .task import Done, Event, Failed, Piece, Progress, Request, Times

__all__ = ["Done", "EachAlone", "Embedder", "Engine", "Event", "Failed", "FirstOf", "Guesser", "ModelGuesser", "Piece", "Progress",
           "Request", "Times", "sampling_defaults"]
