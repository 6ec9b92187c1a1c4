"""What kind of tokenizer a file asks for, and its flags.

In: the key/values. Out: `Config`. Must not know: tokens. Facts: llama.cpp, src/llama-vocab.cpp, `impl::load`.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ggraph import env
from ggraph.errors import VocabError

from .pretok import GUESS, NONE, RULES, Pre
from .tokens import KEY


@dataclass(frozen=True)
class Config:
    """`roles`: the ids that hold where the file names none. The rest: flags, of which the file may set the first five.

    add_space_prefix: a text starts with a space that is not its own. clean_spaces: decoding drops spaces before
    punctuation. remove_extra_whitespaces, lowercase, strip_accents: what Unigram and WordPiece do to text first.
    """
    kind: str
    roles: Mapping[str, int] = field(default_factory=dict)
    add_bos: bool = False
    add_eos: bool = False
    add_sep: bool = False
    add_space_prefix: bool = False
    remove_extra_whitespaces: bool = False
    clean_spaces: bool = False
    lowercase: bool = True
    strip_accents: bool = True
    pre_name: str = ""
    pre: Pre = NONE

    @property
    def escape(self) -> bool:
        """Spaces in tokens are written as U+2581."""
        return self.kind != "bpe" or self.pre.escape


# One row per `tokenizer.ggml.model`.
KINDS = {
    "llama": Config("spm", {"bos": 1, "eos": 2, "unk": 0}, add_bos=True, add_space_prefix=True),
    "gpt2": Config("bpe", {"bos": 11, "eos": 11}),
    "whitespace": Config("bpe", {"bos": 11, "eos": 11}),
    "gemma4": Config("bpe", pre_name="gemma4"),
    "bert": Config("wpm", {"bos": 101, "unk": 100, "sep": 102, "pad": 0, "mask": 103}, add_bos=True, add_sep=True,
                   clean_spaces=True),
    "t5": Config("ugm", {"eos": 1, "unk": 2, "pad": 0}, add_eos=True),
    "rwkv": Config("rwkv"),
    "test": Config("test"),
    "none": Config("none"),
    "no_vocab": Config("none"),
}


def read(kv: Mapping[str, Any]) -> Config:
    model = kv.get(KEY + "model")
    if not isinstance(model, str) or model not in KINDS:
        raise VocabError(f"{KEY}model is {model!r}, a tokenizer that ggraph does not know; it knows {', '.join(KINDS)}")
    config = KINDS[model]
    if config.kind == "bpe":
        config = _with_pre(config, config.pre_name or _pre_name(kv.get(KEY + "pre")))
    lowercase = _flag(kv, "normalizer.lowercase", config.lowercase)
    return replace(
        config,
        add_bos=_flag(kv, "add_bos_token", config.add_bos) or config.pre.newline_runs,     # Gemma 4 files say no
        add_eos=_flag(kv, "add_eos_token", config.add_eos),
        add_sep=_flag(kv, "add_sep_token", config.add_sep),
        add_space_prefix=_flag(kv, "add_space_prefix", config.add_space_prefix),
        remove_extra_whitespaces=_flag(kv, "remove_extra_whitespaces", False),
        lowercase=lowercase,
        strip_accents=_flag(kv, "normalizer.strip_accents", lowercase),
    )


def _with_pre(config: Config, name: str) -> Config:
    pre = RULES[name if name in RULES else GUESS]
    roles = config.roles if pre.has_bos else {"eos": config.roles["eos"]}
    return replace(config, roles=roles, add_bos=pre.add_bos, add_sep=pre.add_sep, clean_spaces=pre.clean_spaces,
                   lowercase=name != "whitespace", pre_name=name, pre=pre)


def _pre_name(name: Any) -> str:
    if not isinstance(name, str | None):
        raise VocabError(f"{KEY}pre should be a name but is {name!r}: convert the model again")
    if not name:
        env.log(f"WARNING: the file does not name its pre-tokenizer ({KEY}pre): using 'default'. Tokens may be wrong and "
                "answers worse: get a newer file of this model, or set the key")
        return "default"
    if name not in RULES:
        env.log(f"WARNING: unknown pre-tokenizer {name!r} ({KEY}pre): guessing the rule of {GUESS!r}. Tokens may be wrong "
                f"and answers worse: set the key to the right one of {', '.join(RULES)}")
    return name


def _flag(kv: Mapping[str, Any], name: str, default: bool) -> bool:
    value = kv.get(KEY + name, default)
    if not isinstance(value, bool):
        raise VocabError(f"{KEY}{name} should be true or false but is {value!r}: convert the model again")
    return value
