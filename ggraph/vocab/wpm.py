"""WordPiece vocabularies ("bert"), in the form that GGUF has them: the first piece of a word starts with U+2581.

In: parts of a text without special tokens. Out: ids. Must not know: special tokens, files.
Facts: llama.cpp, src/llama-vocab.cpp, `llm_tokenizer_wpm_session`. Like llama.cpp, and unlike BERT, decomposing keeps
only the first character (so a Hangul syllable becomes its first letter), and all marks are dropped.
"""
from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence

from .bpe import SPACE
from .pretok import onig
from .tokens import Tokens

CACHED_WORDS = 100_000

# CJK ideographs: each is a word. What is punctuation or a mark is asked of Oniguruma, since Python's own tables are as
# old as the Python.
_CJK = (r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2B73F}\x{2B740}-\x{2B81F}\x{2B920}-\x{2CEAF}"
        r"\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}")
_ALONE = rf"[\p{{P}}{_CJK}$+<=>^`|~]"
_DROPPED = r"[\x{FFFD}\p{Cc}\p{Cf}\p{Co}]"


class Cleaner(dict[int, str]):
    """What each character becomes, for `str.translate`; worked out when a character is first met."""

    def __init__(self, lowercase: bool, strip_accents: bool):
        super().__init__()
        self._lowercase, self._strip_accents = lowercase, strip_accents
        self._is_space, self._is_dropped, self._is_mark, self._is_alone = map(
            _matcher, (r"\s", _DROPPED, r"\p{M}", _ALONE))

    def __missing__(self, code: int) -> str:
        self[code] = clean = self._clean(chr(code))
        return clean

    def _clean(self, c: str) -> str:
        if self._strip_accents:
            c = unicodedata.normalize("NFD", c)[0]
        if self._is_space(c):
            return " "
        if self._is_dropped(c) or (self._strip_accents and self._is_mark(c)):
            return ""
        clean = c.lower()[0] if self._lowercase else c
        return f" {clean} " if self._is_alone(c) else clean


def _matcher(regex: str) -> Callable[[str], bool]:
    from tokenizers import Regex, normalizers

    eraser = normalizers.Replace(Regex(onig(regex)), "")
    return lambda c: not eraser.normalize_str(c)


class WPM:
    def __init__(self, tokens: Tokens, unk: int | None, lowercase: bool, strip_accents: bool):
        self.ids = {text: i for i, text in enumerate(tokens.texts) if text is not None}
        self.unk = unk
        self._longest = max(map(len, self.ids), default=0)
        self._cleaner = Cleaner(lowercase, strip_accents)
        self._words: dict[str, list[int]] = {}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""
        return [[i for word in text.translate(self._cleaner).split(" ") if word for i in self._known(word)]
                for text in texts]

    def _known(self, word: str) -> list[int]:
        ids = self._words.get(word)
        if ids is None:
            if len(self._words) >= CACHED_WORDS:
                self._words.clear()
            self._words[word] = ids = self._pieces(SPACE + word)
        return ids

    def _pieces(self, word: str) -> list[int]:
        """Greedy longest pieces; a word with any part unknown is unknown as a whole."""
        ids, at = [], 0
        while at < len(word):
            for end in range(min(len(word), at + self._longest), at, -1):
                i = self.ids.get(word[at:end])
                if i is not None:
                    ids.append(i)
                    at = end
                    break
            else:
                return [] if self.unk is None else [self.unk]
        return ids
