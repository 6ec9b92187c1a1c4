"""Byte-pair vocabularies, through `tokenizers`.

In: parts of a text without special tokens. Out: ids. Must not know: special tokens, files.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .pretok import Pre, onig
from .tokens import Tokens

if TYPE_CHECKING:
    from tokenizers.models import Model

SPACE = "▁"     # U+2581


def byte_alphabet() -> dict[str, int]:
    """GPT-2's way to write bytes as printable characters: character -> byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


class BPE:
    """`merges`: "left right" as the file has them, best first. `words_only`: white space separates and is dropped."""

    def __init__(self, tokens: Tokens, merges: Sequence[bytes], pre: Pre, words_only: bool = False,
                 lowercase: bool = False):
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers

        self.tokens, self.pre, self.lowercase = tokens, pre, lowercase
        self._n = len(tokens)
        self._tokenizer = Tokenizer(self._model(models.BPE, _pairs(merges)))
        steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Split(Regex(r"\s+"), "removed")] if words_only else []
        steps += [pre_tokenizers.Split(Regex(onig(regex)), "isolated") for regex in pre.splits]
        if not pre.raw:
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)

    def _model(self, make: Callable[..., Model], pairs: list[tuple[str, str]]) -> Model:
        """Merging may pass through strings that are no token. Each gets an id above the vocabulary, so that
        `tokenizers` takes all merges and drops no symbol between two others; `_expand` is what such an id stands for."""
        vocab = {text: i for i, text in enumerate(self.tokens.texts) if text is not None}
        symbols = {f"<0x{b:02X}>" for b in range(256)} if self.pre.raw else set(byte_alphabet())
        if not all(left in vocab and right in vocab and left + right in vocab for left, right in pairs):
            symbols.update(s for left, right in pairs for s in (left, right, left + right))
        missing = sorted(symbols.difference(vocab))
        vocab.update(zip(missing, range(self._n, self._n + len(missing))))
        self._expand = {vocab[s]: self._byte_tokens(s) for s in missing}
        return make(vocab, pairs, byte_fallback=self.pre.raw, ignore_merges=self.pre.ignore_merges)

    def _byte_tokens(self, symbol: str) -> list[int]:
        if self.pre.raw:
            ids = [self.tokens.byte(b) for b in symbol.encode()]
        else:
            ids = [self.tokens.ids.get(bytes([b])) for b in symbol.encode()]
        return [i for i in ids if i is not None]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""
        if self.lowercase:
            texts = ["".join(c.lower()[0] for c in text) for text in texts]
        if self.pre.escape:
            texts = [text.replace(" ", SPACE) for text in texts]
        if self.pre.newline_runs:
            return [self._encode_lines(text) for text in texts]
        return self._encode(texts)

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        rows = [row.ids for row in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
        if self._expand:
            rows = [[j for i in ids for j in self._expand.get(i, (i,))] if max(ids, default=0) >= self._n else ids
                    for ids in rows]
        return rows

    def _encode_lines(self, text: str) -> list[int]:
        parts = [part for part in re.split(r"(\n+)", text) if part]
        known = [self.tokens.ids.get(part.encode()) if part[0] == "\n" else None for part in parts]
        rows = iter(self._encode([part for part, i in zip(parts, known) if i is None]))
        return [j for i in known for j in (next(rows) if i is None else (i,))]


def _pairs(merges: Sequence[bytes]) -> list[tuple[str, str]]:
    """The first space that is not the first character separates the two; the first of two equal merges counts."""
    pairs = []
    for merge in dict.fromkeys(merges):
        text = merge.decode(errors="replace")
        at = text.find(" ", 1)
        if at > 0:
            pairs.append((text[:at], text[at + 1:]))
    return pairs
