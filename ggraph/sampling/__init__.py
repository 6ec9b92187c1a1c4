"""In: logits. Out: tokens. A `Sampler` is a chain of words; `default_chain` writes the one that llama.cpp would use.

Reading order: chain (the Sampler), samplers (what each word does, and their table), candidates, state, dry, order.
"""

from .chain import Grammar, Sampler, describe
from .defaults import DEFAULTS, default_chain

__all__ = ["DEFAULTS", "Grammar", "Sampler", "default_chain", "describe"]
