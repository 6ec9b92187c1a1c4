"""From a prompt to text. Reading order: stops, history, output, generation, llm.

`LLM` is the short way; `History` and `Output` are what anything that runs several sequences together is made of.
"""
from .generation import Generation, Timings
from .history import History
from .llm import LLM
from .output import Output, TokenLogprob

__all__ = ["LLM", "Generation", "History", "Output", "Timings", "TokenLogprob"]
