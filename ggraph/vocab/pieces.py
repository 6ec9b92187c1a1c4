"""The bytes of tokens, and of token lists.

In: `Tokens`, ids. Out: bytes. Must not know: how text is cut into tokens.
Facts: llama.cpp, src/llama-vocab.cpp, `token_to_piece` and `detokenize`.
"""
from __future__ import annotations

import re
from collections.abc import Iterable

from ggraph.errors import VocabError, integer

from .bpe import SPACE, byte_alphabet
from .config import Config
from .rwkv import unescape
from .tokens import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Tokens

_SPACE = SPACE.encode()


class Pieces:
    def __init__(self, tokens: Tokens, config: Config):
        self._tokens, self._config = tokens, config
        self._alphabet = {c: bytes([b]) for c, b in byte_alphabet().items()}
        self._known: dict[int, bytes] = {}

    def piece(self, id: int, special: bool = True) -> bytes:
        """What the token stands for; nothing for a control or unknown token unless `special`."""
        if integer("id", id) not in self._known:
            self._known[id] = self._make(self.check(id))
        return self._known[id] if special or not self._tokens.attrs[id] & (CONTROL | UNKNOWN) else b""

    def check(self, id: int) -> int:
        if not 0 <= integer("id", id) < len(self._tokens):
            raise VocabError(f"token id {id} is not in the vocabulary of {len(self._tokens)} tokens")
        return id

    def _make(self, id: int) -> bytes:
        raw, attr = self._tokens.raw[id], self._tokens.attrs[id]
        if self._config.kind == "test":
            return b"%x" % id
        if self._config.kind == "rwkv":
            return unescape(raw)
        if attr & (UNKNOWN | CONTROL | USER_DEFINED):
            return raw
        if attr & NORMAL:
            return raw.replace(_SPACE, b" ") if self._config.escape else self._from_alphabet(raw)
        if attr & BYTE and re.fullmatch(rb"<0x[0-9A-Fa-f]{2}>", raw):
            return bytes([int(raw[3:5], 16)])
        return b""      # unused and undefined tokens stand for nothing

    def _from_alphabet(self, raw: bytes) -> bytes:
        """GPT-2's characters back to bytes; one that is not of that alphabet stands for itself."""
        return b"".join(self._alphabet.get(c) or c.encode() for c in raw.decode(errors="replace"))

    def join(self, ids: Iterable[int], special: bool) -> bytes:
        """The text of a token list: no added first space, and no space before punctuation where the tokenizer says so."""
        pieces = [self.piece(id, special) for id in ids]
        if pieces and self._config.add_space_prefix:
            pieces[0] = pieces[0].removeprefix(b" ")
        text = b"".join(pieces)
        return _clean_spaces(text) if self._config.clean_spaces else text


def _clean_spaces(text: bytes) -> bytes:
    text = re.sub(rb" ([?!.,])", rb"\1", text)
    text = text.replace(b" ' ", b"'")
    return re.sub(rb" '(?=s|m|re|ve)", b"'", text)
