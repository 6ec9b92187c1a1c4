"""What is wrong with the key/values of a file: tokenizer, chat template, context and positions.

In: an open file. Out: findings. The tokenizer and the template are the ones that `ggraph-run` would use, so what is found
here is what would happen there.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import ggraph
from ggraph.gguf import File

from ._finding import ERROR, NOTE, WARNING, Finding

KEY = "tokenizer.ggml."
ANSWER = "The answer is blue."
SCALINGS = ("none", "linear", "yarn", "longrope")
CONTROL = 3                         # tokenizer.ggml.token_type


def tokenizer(file: File) -> Iterator[Finding]:
    """Is there one, does it load, what does it add, how does a generation end?"""
    if KEY + "model" not in file.kv:
        yield Finding(ERROR, "tokenizer", f"there is no tokenizer: {KEY}model is missing", key=KEY + "model")
        return
    try:
        vocab = ggraph.Vocab(file)
    except ggraph.Error as e:
        yield Finding(ERROR, "tokenizer", str(e), key=KEY + "model")
        return
    if vocab.kind in ("none", "test"):
        yield Finding(NOTE, "tokenizer", f"the file has no tokenizer of its own ({KEY}model is {file.kv[KEY + 'model']!r})")
        return
    yield from _sizes(file, vocab)
    yield from _ids(file, vocab)
    yield from _ends(file, vocab)
    yield from template(file, vocab)


def _sizes(file: File, vocab: ggraph.Vocab) -> Iterator[Finding]:
    rows = next((file.tensors[name].ne[-1] for name in ("token_embd.weight", "output.weight") if name in file.tensors), None)
    if rows is not None and vocab.n_vocab > rows:
        yield Finding(ERROR, "tokenizer", f"there are {vocab.n_vocab} tokens but only {rows} embeddings", "token_embd.weight")
    elif rows is not None and vocab.n_vocab < rows:
        yield Finding(NOTE, "tokenizer", f"{rows - vocab.n_vocab} embeddings have no token", "token_embd.weight")
    for name in ("scores", "token_type"):
        if (key := KEY + name) in file.kv and file.kv.n(key) != vocab.n_vocab:
            yield Finding(ERROR, "tokenizer", f"{key} has {file.kv.n(key)} entries for {vocab.n_vocab} tokens", key=key)


def _ids(file: File, vocab: ggraph.Vocab) -> Iterator[Finding]:
    for key in file.kv:
        if key.startswith(KEY) and key.endswith("_token_id"):
            value = file.kv[key]
            if not isinstance(value, int) or not 0 <= value < vocab.n_vocab:
                yield Finding(ERROR, "tokenizer", f"{key} is {value!r}, there are {vocab.n_vocab} tokens", key=key)
    for flag, id in (("add_bos_token", vocab.bos), ("add_eos_token", vocab.eos)):
        if file.kv.get(KEY + flag) is True and id is None and vocab.kind != "wpm":
            yield Finding(WARNING, "tokenizer", f"{KEY}{flag} is true, but no such token is named", key=KEY + flag)
    if file.kv.get(KEY + "add_bos_token") is None and vocab.kind == "bpe":
        yield Finding(NOTE, "tokenizer", f"{KEY}add_bos_token is missing: the pre-tokenizer {vocab.pre!r} decides "
                      f"({'one is' if vocab.add_bos else 'none is'} added)", key=KEY + "add_bos_token")


def _ends(file: File, vocab: ggraph.Vocab) -> Iterator[Finding]:
    """Tokens that end a generation."""
    if not file.kv.get(f"{file.arch}.attention.causal", True):
        return
    if not vocab.eog:
        yield Finding(WARNING, "tokenizer", "no token ends a generation: the set of such tokens is empty", key=KEY + "eos_token_id")
    types = file.kv.get(KEY + "token_type")
    for role in ("bos", "eos"):
        id = getattr(vocab, role)
        if id is not None and types is not None and id < len(types) and types[id] != CONTROL:
            yield Finding(NOTE, "tokenizer", f"the {role.upper()} token {vocab.text(id)!r} ({id}) is no control token "
                          f"(its type is {types[id]})", key=KEY + "token_type")


def template(file: File, vocab: ggraph.Vocab) -> Iterator[Finding]:
    """Does it render, how often does it write BOS, and does what it writes after an answer end a generation?"""
    source = file.kv.get("tokenizer.chat_template")
    if not isinstance(source, str) or not source:
        yield Finding(NOTE, "template", "there is no chat template", key="tokenizer.chat_template")
        return
    bos, eos = ("" if i is None else vocab.text(i) for i in (vocab.bos, vocab.eos))
    ask, answer = {"role": "user", "content": "Why is the sky blue?"}, {"role": "assistant", "content": ANSWER}
    try:
        made = ggraph.ChatTemplate(source, bos_token=bos, eos_token=eos)
        text = made.render([ask])
        whole = made.render([ask, answer, ask])
    except ggraph.TemplateError as e:
        yield Finding(ERROR, "template", f"the chat template fails on a plain conversation: {e}", key="tokenizer.chat_template")
        return
    yield from _bos(text, bos, vocab)
    yield from _turn_end(whole, vocab)
    try:
        made.render([{"role": "system", "content": "Be brief."}, ask])
    except ggraph.TemplateError as e:
        yield Finding(NOTE, "template", f"it takes no system message: {e}", key="tokenizer.chat_template")


def _bos(text: str, bos: str, vocab: ggraph.Vocab) -> Iterator[Finding]:
    if bos and text.startswith(bos + bos):
        yield Finding(WARNING, "template", f"the chat template writes {bos!r} twice", key="tokenizer.chat_template")
    elif bos and text.startswith(bos) and vocab.add_bos:
        yield Finding(NOTE, "template", f"the chat template writes {bos!r} and the tokenizer adds it, too: a program that encodes "
                      "its text with special tokens has it twice (ggraph and llama.cpp's tools do not)")


def _turn_end(whole: str, vocab: ggraph.Vocab) -> Iterator[Finding]:
    """The first token after an answer, if it is a control token, should end a generation."""
    _, found, rest = whole.partition(ANSWER)
    if not found:
        return
    ids = vocab.encode(rest.lstrip()[:200], add_special=False)
    if not ids or vocab.piece(ids[0], special=False) or ids[0] in vocab.eog:
        return
    if not set(ids) & vocab.eog:
        yield Finding(WARNING, "template", f"the chat template ends an answer with {vocab.text(ids[0])!r} ({ids[0]}), which does "
                      "not end a generation", key=KEY + "eot_token_id", mend={KEY + "eot_token_id": ("UINT32", ids[0])})


def positions(file: File) -> Iterator[Finding]:
    """The trained context and the rotation."""
    arch, kv = file.arch, file.kv

    def number(name: str) -> Any:
        value = kv.get(f"{arch}.{name}")
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def finding(severity: str, what: str, name: str, message: str = "") -> Finding:
        key = f"{arch}.{name}"
        return Finding(severity, what, f"{key} is {kv.get(key)!r}{message}", key=key)
    n_ctx = number("context_length")
    if n_ctx is None or n_ctx <= 0:
        yield finding(ERROR, "context", "context_length")
    for name in ("rope.freq_base", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
                 "rope.freq_base_swa"):
        value = number(name)
        if value is not None and not (math.isfinite(value) and value > 0):
            yield finding(ERROR, "rope", name)
    kind = kv.get(f"{arch}.rope.scaling.type", "none")
    if kind not in SCALINGS:
        yield finding(ERROR, "rope", "rope.scaling.type", f"; known: {', '.join(SCALINGS)}")
    factor, original = number("rope.scaling.factor"), number("rope.scaling.original_context_length")
    if n_ctx and factor and original and kind in ("linear", "yarn") and n_ctx > 1.01 * factor * original:
        yield finding(WARNING, "rope", "context_length", f", but {kind} scaling by {factor:g} of {original} reaches only "
                      f"{factor * original:.0f}")
    n_rot, head = number("rope.dimension_count"), number("attention.key_length")
    if n_rot is not None and (n_rot % 2 or (head and n_rot > head)):
        yield finding(WARNING, "rope", "rope.dimension_count", f" (of a head of {head})")
