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


class Indent:
    """Ends a text at a line that begins with fewer than `n` spaces and tabs; its first line may be as it is."""

    def __init__(self, n: int):
        self.n = n
        self.short = False          # the text has ended
        self._line = -1             # spaces and tabs at the start of the current line so far, -1 behind it

    def push(self, piece: str) -> str:
        """As much of a piece as belongs to the text; the spaces of a line that is too short do."""
        if self.short or self.n <= 0:
            return "" if self.short else piece
        for i, c in enumerate(piece):
            if self._line >= 0 and c in " \t":
                self._line += 1
            elif 0 <= self._line < self.n:
                self.short = True
                return piece[:i]
            else:
                self._line = 0 if c == "\n" else -1
        return piece


def _overlap(text: str, word: str) -> int:
    """Length of the longest end of `text` with which `word` begins, less than the whole word."""
    return next((n for n in range(min(len(text), len(word) - 1), 0, -1) if text.endswith(word[:n])), 0)
