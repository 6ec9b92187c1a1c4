"""Which tokens have a role: BOS, EOS, ..., and which end a generation.

In: the key/values and `Tokens`. Out: ids by role and the EOG set; `Tokens.attrs` of tokens found by name are put
right. Must not know: how text is cut into tokens. Facts: llama.cpp, src/llama-vocab.cpp, `impl::load`.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.errors import VocabError

from .tokens import CONTROL, KEY, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, Tokens

# Role -> its keys, the later one wins.
KEYS = {
    "bos": ("bos_token_id",), "eos": ("eos_token_id",), "eot": ("eot_token_id",), "eom": ("eom_token_id",),
    "unk": ("unknown_token_id",), "sep": ("seperator_token_id",), "pad": ("padding_token_id",),
    "mask": ("mask_token_id",), "fim_pre": ("fim_pre_token_id", "prefix_token_id"),
    "fim_suf": ("fim_suf_token_id", "suffix_token_id"), "fim_mid": ("fim_mid_token_id", "middle_token_id"),
    "fim_pad": ("fim_pad_token_id",), "fim_rep": ("fim_rep_token_id",), "fim_sep": ("fim_sep_token_id",),
}
# Role -> the texts by which it is found when no key names it, most telling first.
NAMES = {
    "eot": ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>",
            "_<EOT>", "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>"),
    "eom": ("<|eom_id|>",),
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
                "<|code_prefix|>", "<|prefix|>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
                "<|code_suffix|>", "<|suffix|>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
                "<|code_middle|>", "<|middle|>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
EOG_NAMES = (*NAMES["eot"], "<|eom_id|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "</s>", "[EOS]", "<eos>",
             "<turn|>", "<|tool_response>", "[e~[")
ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")     # gpt-oss

# Special tokens that take the spaces beside them along. No key says so; llama.cpp goes by names.
MASK_TAKES_LEFT = ("jina-v2-de", "jina-v2-es", "jina-v2-code", "nomic-bert-moe", "jina-bert-v3")
ALL_TAKE_RIGHT, BUT = ("phi-3", "phi3"), (b"<unk>", b"<s>", b"<|endoftext|>")


def roles(kv: Mapping[str, Any], tokens: Tokens, defaults: Mapping[str, int]) -> dict[str, int | None]:
    """The id of each role in KEYS, or None; a token found by its name becomes a control token."""
    ids = {role: _by_key(kv, tokens, role, defaults.get(role)) for role in KEYS}
    for role, names in NAMES.items():
        if ids[role] is None:
            found = [tokens.ids[name.encode()] for name in names if name.encode() in tokens.ids]
            if found:
                ids[role] = found[0]
                tokens.attrs[found[0]] |= CONTROL
    return ids


def _by_key(kv: Mapping[str, Any], tokens: Tokens, role: str, default: int | None) -> int | None:
    found = default if default is not None and default < len(tokens) else None
    for name in KEYS[role]:
        value = kv.get(KEY + name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise VocabError(f"{KEY}{name} should be a token id but is {value!r}: convert the model again")
        if 0 <= value < len(tokens):    # llama.cpp keeps the default for an id out of range
            found = value
    return found


def end_of_generation(tokens: Tokens, ids: Mapping[str, int | None]) -> frozenset[int]:
    """The ids after which a reply is over: the roles, and every token with a name known to end one."""
    for i in tokens.having(CONTROL):
        if b"unused" in tokens.raw[i]:
            tokens.attrs[i] |= UNUSED
    named = {name: tokens.ids[name.encode()] for name in EOG_NAMES if name.encode() in tokens.ids}
    for i in named.values():
        tokens.attrs[i] |= CONTROL
    for name in ALWAYS_SHOWN:
        if name.encode() in tokens.ids:
            tokens.attrs[tokens.ids[name.encode()]] = USER_DEFINED
    eog = {ids[role] for role in ("fim_pad", "fim_rep", "fim_sep", "eos", "eot", "eom")} - {None} | set(named.values())
    texts = {tokens.raw[i] for i in eog if i is not None}
    if texts & {b"<|call|>", b"<|calls|>"} and texts & {b"<|return|>", b"<|flush|>"}:
        _keep_going(tokens, eog, "<|end|>", USER_DEFINED)       # ends a part of the reply only
    if texts & {b"<|tool_response>", b"<|plamo:eos|>"}:
        _keep_going(tokens, eog, "</s>", NORMAL)                # an ordinary piece of HTML there
    return frozenset(i for i in eog if i is not None)


def _keep_going(tokens: Tokens, eog: set[int | None], name: str, attr: int) -> None:
    i = tokens.ids.get(name.encode())
    if i in eog:
        eog.discard(i)
        tokens.attrs[i] = attr


def stripping(tokens: Tokens, kv: Mapping[str, Any], pre: str, arch: str) -> tuple[set[int], set[int]]:
    """The ids that take the spaces on their left along, and those that do so on their right."""
    name = str(kv.get("general.name", "")).lower()
    if pre in MASK_TAKES_LEFT or arch in MASK_TAKES_LEFT:
        return {tokens.ids.get(b"<mask>", -1)}, set()
    if any(part in name for part in ALL_TAKE_RIGHT):
        return set(), set(tokens.having(CONTROL | USER_DEFINED | UNKNOWN)) - {tokens.ids.get(text, -1) for text in BUT}
    if "modern-bert" in name:
        return {tokens.ids.get(b"[MASK]", -1)}, set()
    return set(), set()
