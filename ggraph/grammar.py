"""Constraints on what is generated: GBNF, JSON schema, regular expressions, Lark, through llguidance.

In: a vocabulary and the text of a grammar. Out: a `Grammar` for `ggraph.Sampler`, or `GrammarError`; never an unconstrained
text. llguidance is loaded when a grammar is first made. Must not know: samplers, logits.
"""
from __future__ import annotations

import json
import re
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from .errors import GrammarError, Single, expect, integer
from .vocab import Vocab

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
# The library's compiler recurses, and a stack that overflows ends the process: what is compiled is bounded, on a stack that is
# large enough for it.
MAX_RULES, MAX_PARTS = 2_000, 20_000    # rules of a grammar; its rules and brackets, or the objects and arrays of a schema
STACK = 512 << 20                       # bytes of address space; memory only as far as it is used
WHITESPACE = r" ?|\n{1,2}[ \t]{0,20}"
_NAMED = ("properties", "$defs", "definitions")                         # names -> schemas
_NESTED = ("items", "prefixItems", "anyOf", "oneOf", "additionalProperties")     # a schema, or a list of them
_lock = threading.Lock()
_tokenizers: weakref.WeakKeyDictionary[Vocab, LLTokenizer] = weakref.WeakKeyDictionary()


class Grammar(Single):
    """What may come next in a text that a grammar describes; its end is any end-of-generation token.

    Made by `gbnf`, `json_schema`, `regex` or `lark`. Errors: `GrammarError` if the source does not compile, and from
    `mask` where following it becomes too complex.
    """

    instead = "use clone()"

    def __init__(self, vocab: Vocab, matcher: LLMatcher):
        self._vocab, self._matcher = vocab, matcher

    @classmethod
    def gbnf(cls, vocab: Vocab, source: str) -> Grammar:
        """llama.cpp's grammar language; the start is `root`."""
        llguidance = _library()
        expect("source", source, str, "a text")
        n_rules = source.count("::=")
        _bounded(n_rules, MAX_RULES, "rules")
        _bounded(n_rules + source.count("("), MAX_PARTS, "rules and brackets")
        try:
            lark = llguidance.gbnf_to_lark.gbnf_to_lark(_ESCAPE.sub(_plain, source))
        except Exception as e:      # the converter raises what it happens to
            raise GrammarError(f"failed to parse grammar: {_short(str(e))}") from None
        return cls._compile(vocab, "lark", lark)

    @classmethod
    def lark(cls, vocab: Vocab, source: str) -> Grammar:
        """llguidance's variant of Lark; the start is `start`, `<[ID]>` is a token."""
        expect("source", source, str, "a text")
        return cls._compile(vocab, "lark", source)

    @classmethod
    def json_schema(cls, vocab: Vocab, schema: Mapping[str, Any] | bool) -> Grammar:
        """JSON text that a schema admits, as `as_read` reads it. A keyword that cannot be enforced is an error."""
        expect("schema", schema, (Mapping, bool), "a JSON schema as a mapping, or True")
        try:
            return cls._compile(vocab, "json_schema", json.dumps(cls.as_read(schema)))
        except RecursionError:
            raise GrammarError("the JSON schema is nested too deeply") from None

    @staticmethod
    def as_read(schema: Any) -> Any:
        """A schema as llama.cpp reads it: objects have no properties but those named, and there is little whitespace.

        It may stand behind `%json` in a Lark grammar. `GrammarError` if it is too large.
        """
        _bounded(_n_parts(schema), MAX_PARTS, "objects and arrays")
        return {**_closed(schema), "x-guidance": {"whitespace_pattern": WHITESPACE}} if isinstance(schema, Mapping) else schema

    @classmethod
    def regex(cls, vocab: Vocab, pattern: str) -> Grammar:
        """Text that matches a regular expression as a whole, in the syntax of Rust's regex library."""
        expect("pattern", pattern, str, "a regular expression")
        return cls._compile(vocab, "regex", pattern)

    @classmethod
    def _compile(cls, vocab: Vocab, kind: str, source: str) -> Grammar:
        expect("vocab", vocab, Vocab, "a Vocab")
        llm = _library().LLMatcher
        try:
            tokenizer = _tokenizer(vocab)
            matcher = _deep(lambda: llm(tokenizer, getattr(llm, f"grammar_from_{kind}")(source), log_level=0, limits=_limits()))
        except ValueError as e:         # no JSON object, half of a surrogate pair
            raise GrammarError(f"failed to parse grammar: {_short(str(e))}") from None
        if matcher.is_error():
            raise GrammarError(f"failed to parse grammar: {_short(matcher.get_error())}")
        return cls(vocab, matcher)

    def accepts(self, token: int) -> bool:
        """Whether this token may come next. Changes nothing."""
        if self._vocab.is_eog(token):
            return bool(self._matcher.is_accepting())
        return bool(self._matcher.validate_tokens([token]) == 1)

    def mask(self) -> npt.NDArray[np.bool_]:
        """[n_vocab]: which tokens may come next. Changes nothing."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot be followed any further: {_short(self._matcher.get_error())}")
        return np.unpackbits(bits, bitorder="little")[:self._vocab.n_vocab].astype(np.bool_)

    def accept(self, token: int) -> None:
        """The token has been generated."""
        self._matcher.consume_token(integer("token", token))
        if self._matcher.is_error():
            raise GrammarError(f"the grammar does not admit token {token}: {_short(self._matcher.get_error())}")

    def clone(self) -> Grammar:
        return Grammar(self._vocab, self._matcher.deep_copy())

    def reset(self) -> None:
        self._matcher.reset()


def _short(message: str) -> str:
    """A message of the library, which repeats the source, as far as somebody reads it."""
    lines = [line if len(line) <= 200 else line[:200] + "..." for line in message.strip().splitlines()]
    return "\n".join(lines[:10])


def _bounded(n: int, most: int, what: str) -> None:
    if n > most:
        raise GrammarError(f"failed to parse grammar: it has {n} {what}, {most} are possible")


def _n_parts(schema: Any) -> int:
    """Objects and arrays, however deep they are."""
    n, todo = 0, [schema]
    while todo:
        value = todo.pop()
        if isinstance(value, Mapping | list):
            n += 1
            todo += value.values() if isinstance(value, Mapping) else value
    return n


def _deep(function: Callable[[], T]) -> T:
    """Call it on a large stack."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as e:
            result.set_exception(e)
    with _lock:
        before = threading.stack_size(STACK)
        try:
            thread = threading.Thread(target=run, name="ggraph-grammar")
            thread.start()
        except RuntimeError as e:       # no address space
            raise GrammarError(f"the grammar cannot be compiled: {e}") from None
        finally:
            threading.stack_size(before)
    thread.join()
    return result.result()


def _closed(schema: Any) -> Any:
    """With `additionalProperties: false` where properties are named and nothing is said; not where schemas are combined."""
    if isinstance(schema, list):
        return [_closed(s) for s in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {key: {name: _closed(s) for name, s in value.items()} if key in _NAMED and isinstance(value, Mapping)
              else _closed(value) if key in _NESTED else value for key, value in schema.items()}
    if "properties" in closed and not {"allOf", "anyOf", "oneOf", "$ref", "patternProperties"} & closed.keys():
        closed.setdefault("additionalProperties", False)
    return closed


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise GrammarError("grammars need llguidance: pip install 'ggraph-runtime[grammar]'") from None
    return llguidance


def _plain(escape: re.Match[str]) -> str:
    r"""\u and \U as the character itself: the converter drops their zeros."""
    digits = escape[1] or escape[2]
    if not digits:
        return escape[0]
    code = int(digits, 16)
    return f"\\x{code:02X}" if code < 128 else chr(code) if code < 0x110000 else escape[0]


class _Wrapper:
    """What llguidance asks of a tokenizer."""

    def __init__(self, vocab: Vocab):
        self.eos_token_id = min(vocab.eog)
        self.bos_token_id = vocab.bos
        self.tokens = [vocab.piece(i) for i in range(vocab.n_vocab)]
        self.special_token_ids = [i for i in range(vocab.n_vocab) if vocab.is_control(i)]
        special = set(self.special_token_ids)
        self._ids = {piece: i for i, piece in enumerate(self.tokens) if piece and i not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """The longest token, again and again: `Vocab.encode` may put a space before a text, which is no start here."""
        ids, at = list[int](), 0
        while at < len(text):
            n = next((n for n in range(min(self._longest, len(text) - at), 0, -1) if text[at:at + n] in self._ids), 0)
            if not n:
                return ids
            ids.append(self._ids[text[at:at + n]])
            at += n
        return ids


def _limits() -> Any:
    """The library's own, without its inner state in messages."""
    return _library().LLParserLimits(verbose_errors=False)


def _tokenizer(vocab: Vocab) -> LLTokenizer:
    """A second of work for a large vocabulary, done once."""
    import llguidance

    if not vocab.eog:
        raise GrammarError("this vocabulary has no end-of-generation token: no text of a grammar could end")
    with _lock:
        if vocab not in _tokenizers:
            wrapped = llguidance.TokenizerWrapper(_Wrapper(vocab))
            _tokenizers[vocab] = llguidance.LLTokenizer(wrapped, n_vocab=vocab.n_vocab, eos_token=sorted(vocab.eog))
        return _tokenizers[vocab]
