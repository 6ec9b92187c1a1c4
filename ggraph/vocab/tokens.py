"""The token tables of a GGUF: text, score and kind of every id, checked.

In: the key/values of a file. Out: `Tokens`. Must not know: how text is cut into tokens.
"""
from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ggraph import gguf
from ggraph.errors import VocabError

# Attributes of a token, as llama.cpp's `llama_token_attr` has them; a token may have several.
UNKNOWN, UNUSED, NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 2, 4, 8, 16, 32
UNDEFINED = 0
# Index: `tokenizer.ggml.token_type`.
_BY_TYPE = np.array([UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE], np.uint8)

KEY = "tokenizer.ggml."


class Tokens:
    """`raw` bytes, `scores` float32 and `attrs` uint8 per id; `ids` finds an id by its bytes."""

    def __init__(self, raw: list[bytes], scores: npt.NDArray[np.float32], attrs: npt.NDArray[np.uint8]):
        self.raw = [text or b"[EMPTY_%d]" % i for i, text in enumerate(raw)] if b"" in raw else raw
        self.scores, self.attrs = scores, attrs
        self.ids = dict(zip(self.raw, range(len(self.raw))))
        if len(self.ids) < len(self.raw):
            twice = next(text for i, text in enumerate(self.raw) if self.ids[text] != i)
            raise VocabError(f"token {twice.decode(errors='replace')!r} is in the vocabulary twice: "
                             "convert the model again")

    def __len__(self) -> int:
        return len(self.raw)

    @cached_property
    def texts(self) -> list[str | None]:
        """Each token as a string; None where its bytes are no UTF-8, so that no text can hold it."""
        return [_text(raw) for raw in self.raw]

    def byte(self, value: int) -> int | None:
        """The token that stands for one byte of text without a token of its own."""
        return self.ids.get(b"<0x%02X>" % value)

    def having(self, attrs: int) -> list[int]:
        """The ids that have one of `attrs`, in order."""
        ids: list[int] = np.flatnonzero(self.attrs & attrs).tolist()
        return ids


def _text(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def read(kv: gguf.KV) -> Tokens:
    """The tables of a file. VocabError where they are missing, of the wrong type, or shorter than the token list."""
    if KEY + "tokens" not in kv:
        raise VocabError(f"the file has no {KEY}tokens: it holds no vocabulary, convert the model again")
    raw = _strings(kv, "tokens")
    scores = _numbers(kv, "scores", len(raw), ("ARRAY:FLOAT32", "ARRAY:INT32"))
    types = _numbers(kv, "token_type", len(raw), ("ARRAY:INT32",))
    if scores is not None and not np.isfinite(scores).all():
        raise VocabError(f"{KEY}scores holds values that are no numbers: convert the model again")
    attrs = np.full(len(raw), NORMAL, np.uint8)
    if types is not None:
        attrs = _BY_TYPE[np.where((types >= 0) & (types < len(_BY_TYPE)), types, 0)]
    return Tokens(raw, np.zeros(len(raw), np.float32) if scores is None else scores.astype(np.float32), attrs)


def empty() -> Tokens:
    """For a file that says it has no vocabulary."""
    return Tokens([], np.zeros(0, np.float32), np.zeros(0, np.uint8))


def merges(kv: gguf.KV, pre: str) -> list[bytes]:
    """The merges of a BPE, best first. Kimi K2 has none; for any other vocabulary they must be there."""
    if KEY + "merges" not in kv:
        if pre != "kimi-k2":
            raise VocabError(f"the file has no {KEY}merges: convert the model again")
        return []
    return _strings(kv, "merges")


def charsmap(kv: gguf.KV) -> bytes:
    """SentencePiece's compiled character map, b"" if there is none."""
    name = KEY + "precompiled_charsmap"
    if name not in kv:
        return b""
    if kv.kind(name) not in ("ARRAY:INT8", "ARRAY:UINT8"):
        raise VocabError(f"{name} should be an array of bytes but is {kv.kind(name)}: convert the model again")
    data: bytes = kv[name].tobytes()
    return data


def _strings(kv: gguf.KV, name: str) -> list[bytes]:
    kind = kv.kind(KEY + name)
    if kind != "ARRAY:STRING":
        raise VocabError(f"{KEY}{name} should be an array of strings but is {kind}: convert the model again")
    return kv.raw_strings(KEY + name)


def _numbers(kv: gguf.KV, name: str, n: int, kinds: tuple[str, ...]) -> npt.NDArray[Any] | None:
    if KEY + name not in kv:
        return None
    kind = kv.kind(KEY + name)
    if kind not in kinds:
        raise VocabError(f"{KEY}{name} should be {' or '.join(kinds)} but is {kind}: convert the model again")
    values: npt.NDArray[Any] = kv[KEY + name]
    if len(values) < n:
        raise VocabError(f"{KEY}{name} has {len(values)} values for {n} tokens: convert the model again")
    return values[:n]
