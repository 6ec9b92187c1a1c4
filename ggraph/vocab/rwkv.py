"""RWKV's vocabulary: byte strings, the longest token wins.

In: parts of a text. Out: ids. Must not know: special tokens, files.
Facts: llama.cpp, src/llama-vocab.cpp, `llm_tokenizer_rwkv` and `llama_unescape_rwkv_token`.
"""
from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from .tokens import Tokens

_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_NAMED = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}


def unescape(raw: bytes) -> bytes:
    r"""A token's text writes bytes as \xHH, \t, \n, \r; a backslash before anything else stands for that."""
    return _ESCAPE.sub(lambda m: bytes.fromhex(m[1].decode()) if m[1] else _NAMED.get(m[2], m[2]), raw)


class RWKV:
    def __init__(self, tokens: Tokens, unk: int | None):
        self.unk = unk
        self.ids = {unescape(raw): i for i, raw in enumerate(tokens.raw)}
        lengths: dict[bytes, set[int]] = defaultdict(set)
        for text in self.ids:
            lengths[text[:2]].add(len(text))
        self._lengths = {head: sorted(n, reverse=True) for head, n in lengths.items()}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""
        return [self._encode(text.encode()) for text in texts]

    def _encode(self, text: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(text):
            n = next((n for n in self._lengths.get(text[at:at + 2], ()) if text[at:at + n] in self.ids), 1)
            i = self.ids.get(text[at:at + n], self.unk)
            if i is not None:
                ids.append(i)
            at += n
        return ids
