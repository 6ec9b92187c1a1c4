"""Unigram vocabularies ("t5"): `sentencepiece` applies the character map, `tokenizers` finds the best pieces.

In: parts of a text without special tokens. Out: ids. Must not know: special tokens, files.
Facts: llama.cpp, src/llama-vocab.cpp, `llm_tokenizer_ugm`. It scores in float64 and gives user-defined pieces 0, as
`tokenizers` does with the scores set here; sentencepiece's own float32 search would differ in near-ties.
"""
from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ggraph.errors import VocabError

from .bpe import SPACE
from .spm import varint
from .tokens import NORMAL, UNUSED, USER_DEFINED, Tokens


class Spaces(NamedTuple):
    """`prefix`: one space before the first word. `merge`: exactly one space before each word."""
    prefix: bool
    merge: bool

    def apply(self, text: str) -> str:
        if self.merge:
            return "".join(SPACE + word for word in text.split(" ") if word)
        start = len(text) - len(text.lstrip(" "))
        if self.prefix and start < len(text):
            text = text[:start] + " " + text[start:]
        return text.replace(" ", SPACE)


class UGM:
    def __init__(self, tokens: Tokens, unk: int | None, charsmap: bytes, spaces: Spaces):
        from tokenizers import Tokenizer, models

        if unk is None:
            raise VocabError("a Unigram vocabulary needs an unknown token: convert the model again")
        self._spaces = spaces
        self._normalizer = _normalizer(charsmap) if charsmap else None
        self._beginnings = _beginnings(tokens)
        self._tokenizer = Tokenizer(models.Unigram(_pieces(tokens), unk, False))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""
        clean = [self._spaces.apply(self._normalize(text)) for text in texts]
        return [row.ids for row in self._tokenizer.encode_batch_fast(clean, add_special_tokens=False)]

    def _normalize(self, text: str) -> str:
        """The character map, applied around what begins a user-defined token: llama.cpp leaves that as it is, even
        where the rest of the token does not follow."""
        if self._normalizer is None:
            return text
        parts = self._beginnings.split(text) if self._beginnings else [text]
        return "".join(part if i % 2 else self._normalizer.Normalize(part) for i, part in enumerate(parts))


def _beginnings(tokens: Tokens) -> re.Pattern[str] | None:
    texts = [text for i in tokens.having(USER_DEFINED) if (text := tokens.texts[i])]
    heads = sorted({text[:n] for text in texts for n in range(1, len(text) + 1)}, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, heads))})") if heads else None


def _pieces(tokens: Tokens) -> list[tuple[str, float]]:
    """(text, score) per id. Tokens that text must not match get a name that no text has, and a score that does not
    lower the least one, from which the library takes the price of an unknown character."""
    pieces = []
    for i, (text, score, attr) in enumerate(zip(tokens.texts, tokens.scores.tolist(), tokens.attrs.tolist())):
        if text is None or not attr & (NORMAL | USER_DEFINED | UNUSED):
            pieces.append((f"\U0010fffe{i}\U0010ffff", 0.0))
        else:
            pieces.append((text, 0.0 if attr & USER_DEFINED else score))
    return pieces


def _normalizer(charsmap: bytes) -> Any:
    import sentencepiece

    spec = b"\x12" + varint(len(charsmap)) + charsmap
    try:
        return sentencepiece.SentencePieceNormalizer(model_proto=b"\x1a" + varint(len(spec)) + spec,
                                                     add_dummy_prefix=False, escape_whitespaces=False,
                                                     remove_extra_whitespaces=False)
    except RuntimeError as error:
        raise VocabError(f"tokenizer.ggml.precompiled_charsmap is damaged: {error}") from None
