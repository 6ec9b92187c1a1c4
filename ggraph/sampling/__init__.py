"""In: logits. Out: tokens. A `Sampler` is a chain of words; `default_chain` writes the one that llama.cpp would use.

Reading order: chain (the Sampler), samplers (what each word does, and their table), candidates, state, dry, order; budget.
"""

from ggraph.sampling.budget import ReasoningBudget
from ggraph.sampling.chain import Grammar, Sampler, describe
from ggraph.sampling.defaults import DEFAULTS, default_chain

__all__ = ["DEFAULTS", "Grammar", "ReasoningBudget", "Sampler", "default_chain", "describe"]
