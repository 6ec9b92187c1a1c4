"""What a generation has brought forth: tokens in, text and the reason to end out.

In: sampled tokens, rows of logits. Out: pieces of text (whole characters, nothing of a stop string), log-probabilities.
Must not know: contexts, samplers.
"""
from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import SamplerError
from ..vocab import Vocab
from .stops import Indent, Stops


class TokenLogprob(NamedTuple):
    """Natural logarithm of a token's probability before sampling; `top`: the likeliest (token, logprob), best first."""
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Output:
    """`finish_reason` is None while the text goes on; then "stop" (`stop_type` "eos" or "word"), "length" ("limit" or
    "context") or "cancelled". `tokens` are all that were sampled, with the one that ended the text.

    At most `max_tokens`, no limit if negative; `stop`: strings that end the text; `special`: control tokens are text; a line whose
    indentation is below `n_indent` ends it ("limit").
    """

    def __init__(self, vocab: Vocab, max_tokens: int = -1, stop: str | Iterable[str] = (), special: bool = False,
                 n_indent: int = 0):
        self.vocab, self.max_tokens, self.special = vocab, max_tokens, special
        self.tokens: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.stop_type: str | None = None
        self.stops = Stops([stop] if isinstance(stop, str) else stop)
        self._indent = Indent(n_indent)
        self._decoder = vocab.stream_decoder(special)

    def push(self, token: int) -> str:
        """Take a token; the text that it made certain."""
        self.tokens.append(token)
        ends = self.vocab.is_eog(token)
        piece = self._take(self._decoder.push(token)) if self.special or not ends else ""
        if self._indent.short:
            self.finish_reason, self.stop_type = "length", "limit"
        elif self.stops.found is not None:
            self.finish_reason, self.stop_type = "stop", "word"
        elif ends:
            piece += self.finish("stop", "eos")
        elif 0 <= self.max_tokens <= len(self.tokens):
            piece += self.finish("length", "limit")
        return piece

    def finish(self, reason: str, stop_type: str | None = None) -> str:
        """End the text; what was held back of it."""
        piece = self._take(self._decoder.finish())
        self.finish_reason, self.stop_type = reason, stop_type
        rest = self._indent.push(self.stops.finish())
        self.text += rest
        return piece + rest

    def _take(self, piece: str) -> str:
        certain = self._indent.push(self.stops.push(piece))
        self.text += certain
        return certain


def logprob(row: npt.NDArray[np.float32], token: int, n_top: int = 0) -> TokenLogprob:
    """Of one token, and of the `n_top` likeliest, by a row of logits [n_vocab]. SamplerError for NaN or inf in it."""
    best = float(row.max())
    if not math.isfinite(best):
        raise SamplerError(f"the largest logit is {best}, so that there are no probabilities: look at the model file")
    norm = best + float(np.log(np.exp(row - best).sum(dtype=np.float64)))
    n_top = min(n_top, len(row))
    top: Any = np.argpartition(-row, n_top - 1)[:n_top] if n_top else ()
    top = sorted(((int(i), float(row[i]) - norm) for i in top), key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprob(token, float(row[token]) - norm, tuple(top))
