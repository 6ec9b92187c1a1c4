"""A model's vocabulary: text -> ids -> text, as llama.cpp does it.

In: a GGUF, as a path or an open `gguf.File`. Out: `Vocab`. Must not know: models, weights, chat templates.
Reading order: config, tokens, special, partition, pretok; one file per kind of tokenizer (bpe, spm, wpm, ugm, rwkv);
then back: pieces, stream. The libraries are loaded, and the encoder built, when a text is first encoded.
"""
from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from ggraph import env, gguf
from ggraph.errors import VocabError, expect, file_path, flags, integer, named

from . import config, special, tokens
from .partition import Partition
from .pieces import Pieces
from .stream import StreamDecoder
from .tokens import CONTROL, KEY

__all__ = ["StreamDecoder", "Vocab"]


class Encoder(Protocol):
    def encode(self, texts: Sequence[str]) -> list[list[int]]: ...


class Vocab:
    """Encodes and decodes text. `source`: a path or an open `gguf.File`; `kv_overrides` replaces its keys.

    `kind` is "bpe", "spm", "wpm", "ugm", "rwkv", "test" or "none"; `pre` names a BPE's pre-tokenizer. `bos`, `eos`,
    `eot`, `eom`, `unk`, `sep`, `pad`, `mask`, `fim_pre`, `fim_suf`, `fim_mid`, `fim_pad`, `fim_rep` and `fim_sep` are
    ids or None; `eog` are all ids that end a generation. Errors: `VocabError` for a tokenizer that is missing, unknown
    or inconsistent, and for an id out of range. Threads may share a Vocab.
    """
    bos: int | None
    eos: int | None
    eot: int | None
    eom: int | None
    unk: int | None
    sep: int | None
    pad: int | None
    mask: int | None
    fim_pre: int | None
    fim_suf: int | None
    fim_mid: int | None
    fim_pad: int | None
    fim_rep: int | None
    fim_sep: int | None

    def __init__(self, source: str | os.PathLike[str] | gguf.File, *, kv_overrides: Mapping[str, Any] | None = None):
        overrides = named("kv_overrides", kv_overrides)
        if isinstance(source, gguf.File):
            self._load(source, overrides)
        else:
            with gguf.File(file_path("source", source)) as file:
                self._load(file, overrides)

    def _load(self, file: gguf.File, overrides: dict[str, Any]) -> None:
        kv: Mapping[str, Any] = ChainMap(overrides, file.kv)  # type: ignore[arg-type]
        self._config = config.read(kv)
        self.kind, self.pre = self._config.kind, self._config.pre_name
        textless = self.kind in ("none", "test") and KEY + "tokens" not in file.kv
        self._tokens = tokens.empty() if textless else tokens.read(file.kv)
        size = kv.get(f"{file.arch}.vocab_size", 0)
        self.n_vocab = len(self._tokens) or (size if isinstance(size, int) else 0)
        ids = special.roles(kv, self._tokens, self._config.roles)
        self.eog = special.end_of_generation(self._tokens, ids)
        for role, id in ids.items():
            setattr(self, role, id)
        self._set_additions()
        self._partition = Partition(self._tokens, *special.stripping(self._tokens, kv, self.pre, file.arch))
        self._pieces = Pieces(self._tokens, self._config)
        self._merges = tokens.merges(file.kv, self.pre) if self.kind == "bpe" else []
        self._charsmap = tokens.charsmap(file.kv) if self.kind == "ugm" else b""
        self._words_only = kv[KEY + "model"] == "whitespace"

    def _set_additions(self) -> None:
        """What `encode` puts around a text. WordPiece has BOS and SEP there whatever the flags say, RWKV nothing."""
        c = self._config
        self.add_bos, self.add_eos, self.add_sep = c.add_bos, c.add_eos, c.add_sep
        for flag, id in (("add_bos", self.bos), ("add_eos", self.eos)):
            if getattr(self, flag) and id is None:
                env.log(f"the file says {flag} but names no such token: none is added")
                setattr(self, flag, False)
        before, after = self.bos if self.add_bos else None, self.eos if self.add_eos else None
        if self.kind == "wpm":
            before, after = self.bos, self.sep
        elif self.kind == "rwkv":
            before = after = None
        self._before, self._after = [[] if id is None else [id] for id in (before, after)]

    @cached_property
    def _encoder(self) -> Encoder:
        """Built when a text is first encoded; the libraries are imported there."""
        c, t = self._config, self._tokens
        if self.kind == "bpe":
            from .bpe import BPE
            return BPE(t, self._merges, c.pre, self._words_only, self._words_only and c.lowercase)
        if self.kind == "spm":
            from .spm import SPM
            return SPM(t, self.unk, c.add_space_prefix)
        if self.kind == "wpm":
            from .wpm import WPM
            return WPM(t, self.unk, c.lowercase, c.strip_accents)
        if self.kind == "ugm":
            from .ugm import UGM, Spaces
            return UGM(t, self.unk, self._charsmap, Spaces(c.add_space_prefix, c.remove_extra_whitespaces))
        if self.kind == "rwkv":
            from .rwkv import RWKV
            return RWKV(t, self.unk)
        raise VocabError(f"this file has no tokenizer (it is of kind {self.kind!r}): give token ids instead of text")

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """The ids of a text. `add_special`: with the BOS, EOS or SEP that the tokenizer adds. `parse_special`: control
        tokens written out in the text become those tokens (never do this with text from strangers)."""
        expect("text", text, str, "a text")
        flags(add_special=add_special, parse_special=parse_special)
        encoder = self._encoder
        parts = self._partition.split(_well_formed(text), parse_special)
        rows = iter(encoder.encode([part for part in parts if isinstance(part, str)]))
        ids = list(self._before) if add_special else []
        for part in parts:
            if isinstance(part, str):
                ids += next(rows)
            else:
                ids.append(part)
        return ids + self._after if add_special else ids

    def decode(self, ids: Iterable[int], special: bool = True) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD. `special`: with the text of control tokens."""
        return self.decode_bytes(ids, special).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[int], special: bool = True) -> bytes:
        """The same as bytes. This undoes what `encode` adds: the first space, where it adds one, is gone, and some
        vocabularies drop spaces before punctuation."""
        expect("ids", ids, Iterable, "a list of token ids")
        flags(special=special)
        return self._pieces.join(ids, special)

    def piece(self, id: int, special: bool = True) -> bytes:
        """The bytes of one token, as they stand in a running text; b"" for a control token unless `special`."""
        flags(special=special)
        return self._pieces.piece(id, special)

    def stream_decoder(self, special: bool = True) -> StreamDecoder:
        """Turns the ids of a running generation into text, character by whole character: the pieces as they come, so
        a first space stays, since what comes before belongs to the text."""
        flags(special=special)
        return StreamDecoder(lambda id: self._pieces.piece(id, special))

    def text(self, id: int) -> str:
        """The token as the file has it (bytes that are no UTF-8 become U+FFFD)."""
        return self._tokens.raw[self._pieces.check(id)].decode(errors="replace")

    def is_eog(self, id: int) -> bool:
        """Whether a generation ends with this token."""
        return integer("the token id", id) in self.eog

    def is_control(self, id: int) -> bool:
        """Whether the token is a mark of the format rather than text."""
        return bool(self._tokens.attrs[self._pieces.check(id)] & CONTROL)

    @cached_property
    def nl(self) -> int | None:
        """The token of a newline, or the padding token where there is none."""
        if self.kind in ("none", "test"):
            return None
        if self.kind == "wpm":
            return self.pad
        if self.kind == "spm":
            found = self._tokens.byte(10)
            return self._tokens.ids.get(b"\n", self.pad) if found is None else found
        return next(iter(self._encoder.encode(["\n"])[0]), self.pad)


def _well_formed(text: str) -> str:
    """Joins surrogate pairs, as broken JSON decoders leave them; a single surrogate becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
