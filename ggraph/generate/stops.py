"""Stop strings in a text that comes in pieces, wherever the borders fall.

In: pieces of text. Out: the same text as far as it can no longer become part of a stop string; nothing from the first
stop string on. Must not know: tokens.
"""
from __future__ import annotations

from collections.abc import Iterable

from ..errors import expect


class Stops:
    """`found` is the stop string that ended the text, None while there is none. Empty stop strings are left out.

    The first one to be complete ends the text, of two that end together the longer one: so how the text is cut into
    pieces makes no difference.
    """

    def __init__(self, words: Iterable[str] = ()):
        expect("stop", words, Iterable, "a text or texts")
        for word in words:
            expect("a stop string", word, str, "a text")
        self.words = tuple(w for w in words if w)
        self.found: str | None = None
        self._held = ""

    def push(self, piece: str) -> str:
        """What is certain by now to be part of the text."""
        if self.found is not None:
            return ""
        text = self._held + piece
        ends = [(at + len(w), at, w) for w in self.words if (at := text.find(w)) >= 0]
        if ends:
            _, at, self.found = min(ends)
            self._held = ""
            return text[:at]
        n = max((_overlap(text, w) for w in self.words), default=0)
        self._held = text[len(text) - n:]
        return text[:len(text) - n]

    def finish(self) -> str:
        """What was held back: no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, word: str) -> int:
    """Length of the longest end of `text` with which `word` begins, less than the whole word."""
    return next((n for n in range(min(len(text), len(word) - 1), 0, -1) if text.endswith(word[:n])), 0)
