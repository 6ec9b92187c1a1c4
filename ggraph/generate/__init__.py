"""From a prompt to text. Reading order: stops, history, output, drawn, speculative, mtp, generation, llm.

`LLM` is the short way; `History` and `Output` are what anything that runs several sequences together is made of.
"""
from .generation import Generation, Timings
from .history import History
from .llm import LLM
from .mtp import MtpDraft, Nextn
from .output import Output, TokenLogprob
from .speculative import Drafter, ModelDraft, NgramDraft, Speculation

__all__ = ["LLM", "Drafter", "Generation", "History", "ModelDraft", "MtpDraft", "Nextn", "NgramDraft", "Output", "Speculation",
           "Timings", "TokenLogprob"]
