"""Bytes of tokens, one token after the other -> text, whole characters only.

In: a function id -> bytes. Out: `StreamDecoder`. Must not know: vocabularies.
"""
from __future__ import annotations

import codecs
from collections.abc import Callable


class StreamDecoder:
    """Joins the pieces of a running generation. All that `push` and `finish` return, joined, is the text of all
    pieces; bytes that are no UTF-8 become U+FFFD as soon as no later byte can make them valid."""

    def __init__(self, piece: Callable[[int], bytes]):
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The characters that this token completes; those still open are held back."""
        return self._decoder.decode(self._piece(id))

    def finish(self) -> str:
        """What is left: U+FFFD if the last character never became whole. The decoder can then be used again."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
