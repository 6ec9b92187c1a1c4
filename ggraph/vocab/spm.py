"""SentencePiece BPE vocabularies ("llama"), through `sentencepiece`.

In: parts of a text without special tokens. Out: ids. Must not know: special tokens, files.

The library gets every token as an ordinary piece, whatever its kind, since llama.cpp's merging makes no difference
either, plus one piece for what is unknown. Bytes stand in for unknown characters here, not in the library.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ggraph.errors import VocabError

from .bpe import SPACE
from .tokens import Tokens

# Fields of sentencepiece_model.proto, as wire bytes: (number << 3) | kind.
_BPE = b"\x12\x02\x18\x02"                          # trainer_spec { model_type: BPE }
_PLAIN = b"\x1a\x06\x18\x00\x20\x00\x28\x00"        # normalizer_spec { all three space rules off }
_UNKNOWN = b"\x18\x02"                              # piece.type = UNKNOWN


class SPM:
    """`space_prefix`: every part starts with a space that is not its own."""

    def __init__(self, tokens: Tokens, unk: int | None, space_prefix: bool):
        import sentencepiece

        self.tokens, self.unk = tokens, unk
        self._prefix = SPACE if space_prefix else ""
        self._unknown = len(tokens)
        try:
            self._processor: Any = sentencepiece.SentencePieceProcessor(model_proto=model_proto(tokens))
        except RuntimeError as error:
            raise VocabError(f"sentencepiece does not take this vocabulary: {error}") from None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""
        return [self._encode(self._prefix + text.replace(" ", SPACE)) for text in texts]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._processor.EncodeAsIds(text)
        if self._unknown not in ids:
            return ids
        pieces = self._processor.EncodeAsPieces(text)
        return [j for i, piece in zip(ids, pieces) for j in (self._bytes(piece) if i == self._unknown else (i,))]

    def _bytes(self, text: str) -> Iterator[int]:
        for b in text.encode():
            i = self.tokens.byte(b)
            if i is None:
                i = self.tokens.ids.get(bytes([b]), self.unk)
            if i is not None:
                yield i


def model_proto(tokens: Tokens) -> bytes:
    """The serialized ModelProto: a BPE model of all tokens, and the unknown piece as the last id."""
    lengths = [varint(n) for n in range(256)]
    scores = np.ascontiguousarray(tokens.scores, "<f4").tobytes()
    parts: list[bytes] = []
    for i, raw in enumerate(tokens.raw):
        n = len(raw)
        body = b"\n" + (lengths[n] if n < 256 else varint(n)) + raw + b"\x15" + scores[4 * i:4 * i + 4]
        parts += b"\n", varint(len(body)) if len(body) > 255 else lengths[len(body)], body
    unknown = _unused_name(tokens)
    body = b"\n" + varint(len(unknown)) + unknown + _UNKNOWN
    return b"".join([*parts, b"\n", varint(len(body)), body, _BPE, _PLAIN])


def _unused_name(tokens: Tokens) -> bytes:
    name = b"<unknown>"
    while name in tokens.ids:
        name += b">"
    return name


def varint(n: int) -> bytes:
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes([*out, n])
