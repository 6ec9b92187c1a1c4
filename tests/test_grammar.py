"""Grammars: what they admit, what does not compile, and that nothing gets past them."""
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggraph
from tests import tiny

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> ggraph.Vocab:
    return ggraph.Vocab(tiny.write(tmp_path_factory.mktemp("grammar") / "tiny.gguf"))


def written(vocab: ggraph.Vocab, grammar: ggraph.Grammar, seed: int = 0, n: int = 400) -> str | None:
    """A text by random logits under the grammar; None if it did not end."""
    rng = np.random.default_rng(seed)
    sampler, ids = ggraph.Sampler(f"temp 1;dist {seed}", vocab.n_vocab, grammar=grammar), list[int]()
    for _ in range(n):
        row = rng.normal(size=vocab.n_vocab).astype(np.float32)
        row[sorted(vocab.eog)] += 3
        token = sampler.sample(row)
        sampler.accept(token)
        if vocab.is_eog(token):
            return vocab.stream_decoder().push(ids[0]) + b"".join(map(vocab.piece, ids[1:])).decode() if ids else ""
        ids.append(token)
    return None


@pytest.mark.parametrize("source, pattern", [
    ('root ::= "yes" | "no"', "yes|no"),
    ('root ::= "rain" | "wind"', "rain|wind"),
    ('root ::= word (" " word){2}\nword ::= [a-c]+', "[a-c]+ [a-c]+ [a-c]+"),
    ('root ::= "a" ("" | "x")* "b"', "ax*b"),
    (r'root ::= [\u0041-\u0043]{2} "\u00e9" "\n"', "[ABC]{2}é\n"),
    ('root ::= root "a" | "b"', "ba*"),
    ('# a comment\nroot ::= (\n  "a" | "b"\n)\n', "a|b"),
])
def test_gbnf(vocab: ggraph.Vocab, source: str, pattern: str) -> None:
    texts = [written(vocab, ggraph.Grammar.gbnf(vocab, source), seed) for seed in range(8)]
    done = [t for t in texts if t is not None]
    assert done and all(re.fullmatch(pattern, t) for t in done), texts


def test_json_schema(vocab: ggraph.Vocab) -> None:
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}, "n": {"type": "integer", "minimum": 0,
              "maximum": 9}}, "required": ["colour"]}
    texts = [written(vocab, ggraph.Grammar.json_schema(vocab, schema), seed) for seed in range(8)]
    made = [json.loads(t) for t in texts if t]
    assert made
    for value in made:
        assert value["colour"] in ("red", "blue") and value.get("n", 0) in range(10) and set(value) <= {"colour", "n"}


def test_regex(vocab: ggraph.Vocab) -> None:
    assert re.fullmatch("[ab]{3}c?", written(vocab, ggraph.Grammar.regex(vocab, "[ab]{3}c?")) or "")


def test_a_token_by_its_id(vocab: ggraph.Vocab) -> None:
    grammar = ggraph.Grammar.lark(vocab, 'start: <[3]> "a"')
    assert grammar.accepts(3) and list(np.flatnonzero(grammar.mask())) == [3]


def test_mask_and_accepts_agree(vocab: ggraph.Vocab) -> None:
    """But for tokens with the same bytes, of which the mask may name one alone."""
    grammar = ggraph.Grammar.gbnf(vocab, 'root ::= ("the" | "rain" | " in")+')
    for text in ("t", "h", "e", " in", "r"):
        allowed = {vocab.piece(int(i)) for i in np.flatnonzero(grammar.mask())}
        assert allowed == {vocab.piece(i) for i in range(vocab.n_vocab) if grammar.accepts(i)} or len(allowed) == 1
        grammar.accept(next(i for i in range(vocab.n_vocab) if vocab.piece(i) == text.encode()))


def test_clone_and_reset(vocab: ggraph.Vocab) -> None:
    grammar = ggraph.Grammar.gbnf(vocab, 'root ::= "ab"')
    a, b = (next(i for i in range(vocab.n_vocab) if vocab.piece(i) == c) for c in (b"a", b"b"))
    grammar.accept(a)
    twin = grammar.clone()
    twin.accept(b)
    assert grammar.accepts(b) and not grammar.accepts(vocab.eos or 0) and twin.accepts(vocab.eos or 0)
    grammar.reset()
    assert grammar.accepts(a)
    with pytest.raises(ggraph.GrammarError):
        grammar.accept(b)


@pytest.mark.parametrize("source", ["", "root ::= (", "x", "root ::= missing", "root ::= " + "(" * 60_000, 'root ::= "\\',
                                    "root ::= [", '"a"', r'root ::= "\ud800"', "root ::= \ud800",
                                    r"root ::= [\UFFFFFFFF]"], ids=range(11))
def test_what_does_not_compile(vocab: ggraph.Vocab, source: str) -> None:
    with pytest.raises(ggraph.GrammarError):
        ggraph.Grammar.gbnf(vocab, source)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize("schema", [{"type": "nope"}, {"$ref": "#/nope"}, {"type": "string", "pattern": "a(b"},
                                    {"not": {}, "type": "string"}, {"enum": []}, nested(100_000)], ids=range(6))
def test_schemas_that_do_not_compile(vocab: ggraph.Vocab, schema: dict[str, Any]) -> None:
    with pytest.raises(ggraph.GrammarError):
        ggraph.Grammar.json_schema(vocab, schema)


def test_a_long_string_is_counted_not_expanded(vocab: ggraph.Vocab) -> None:
    ggraph.Grammar.json_schema(vocab, {"type": "object", "properties": {"x": {"type": "string", "maxLength": 65536}}}).mask()


def test_regex_that_does_not_compile(vocab: ggraph.Vocab) -> None:
    with pytest.raises(ggraph.GrammarError):
        ggraph.Grammar.regex(vocab, "a(")


def test_a_vocabulary_without_an_end(tmp_path: Path) -> None:
    file = tiny.write(tmp_path / "endless.gguf")
    vocab = ggraph.Vocab(file)
    vocab.eog = frozenset()
    with pytest.raises(ggraph.GrammarError, match="could end"):
        ggraph.Grammar.gbnf(vocab, 'root ::= "a"')


