"""Cuts special tokens out of a text before anything else looks at it.

In: a text. Out: its parts: strings still to be tokenized, and ids. Must not know: how the rest is tokenized.
Facts: llama.cpp, src/llama-vocab.cpp, `tokenizer_st_partition`: longer tokens first, wherever they stand; each takes
its occurrences from left to right.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .tokens import CONTROL, UNKNOWN, USER_DEFINED, Tokens

SPACES = " \t\n\v\f\r"      # C's isspace
HEAD = 6                    # characters by which specials are looked for together


class Special(NamedTuple):
    """`parsed`: matched only where the caller asked for it. `lstrip`, `rstrip`: takes the spaces beside it along."""
    text: str
    id: int
    parsed: bool
    lstrip: bool
    rstrip: bool

    def cut_part(self, part: str | int) -> Iterable[str | int]:
        return self._cut(part) if isinstance(part, str) and self.text in part else (part,)

    def _cut(self, text: str) -> Iterator[str | int]:
        at = 0
        while (found := text.find(self.text, at)) >= 0:
            left = text[at:found]
            if self.lstrip:
                left = left.rstrip(SPACES)
            if left:
                yield left
            yield self.id
            at = found + len(self.text)
            while self.rstrip and text[at:at + 1] and text[at] in SPACES:
                at += 1
        if at < len(text):
            yield text[at:]


class Partition:
    """`lstrip`, `rstrip`: ids that take the spaces on their left or right along."""

    def __init__(self, tokens: Tokens, lstrip: set[int], rstrip: set[int]):
        ids = tokens.having(CONTROL | USER_DEFINED | UNKNOWN)
        ids.sort(key=lambda i: -len(tokens.raw[i]))
        self._by_head: dict[str, list[tuple[int, Special]]] = defaultdict(list)
        for rank, i in enumerate(ids):
            text = tokens.texts[i]
            if text is not None:
                parsed = bool(tokens.attrs[i] & (CONTROL | UNKNOWN))
                special = Special(text, i, parsed, i in lstrip, i in rstrip)
                self._by_head[text[:HEAD]].append((rank, special))

    def split(self, text: str, parse_special: bool) -> list[str | int]:
        parts: list[str | int] = [text] if text else []
        for special in self._present(text):
            if parse_special or not special.parsed:
                parts = [p for part in parts for p in special.cut_part(part)]
        return parts

    def _present(self, text: str) -> list[Special]:
        """The specials that stand in the text, longest first. A vocabulary has thousands, a text a few."""
        found = [ranked for head, group in self._by_head.items() if head in text
                 for ranked in group if ranked[1].text in text]
        return [special for _, special in sorted(found)]
