"""Every pre-tokenizer name against the words into which llama.cpp cuts the same texts."""
from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from ggraph.vocab.pretok import GUESS, RULES, onig
from tests.vocab.build import GOLDEN

DATA = json.loads((GOLDEN / "pretok.json").read_text())


def words(splits: tuple[str, ...], text: str) -> list[int]:
    """Their lengths in characters."""
    cutter = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(onig(regex)), "isolated") for regex in splits])
    return [end - start for _, (start, end) in cutter.pre_tokenize_str(text)]


@pytest.mark.parametrize("rule", DATA["rules"], ids=lambda rule: rule["names"][0])
def test_words(rule: dict[str, Any]) -> None:
    for name in rule["names"]:
        assert RULES[name].splits == RULES[rule["names"][0]].splits
    for text, expected in zip(DATA["texts"], rule["words"]):
        assert words(RULES[rule["names"][0]].splits, text) == expected, text


def test_every_name_has_a_golden() -> None:
    assert sorted(RULES) == sorted(name for rule in DATA["rules"] for name in rule["names"])
    assert GUESS in RULES


def test_classes_stand_on_unicode_15_1() -> None:
    letter = Regex(onig(r"\p{L}"))
    for text, pieces in {"a\u1c89b": 3, "aéb": 3, "a\u0378b": 3}.items():
        assert len(pre_tokenizers.Split(letter, "isolated").pre_tokenize_str(text)) == pieces
    assert words((r"\p{L}+",), "a\u1c89b") == [1, 1, 1] and words((r"\p{L}+",), "aéb") == [3]


def test_rows_name_each_pre_tokenizer_once() -> None:
    names = [name for rule in DATA["rules"] for name in rule["names"]]
    assert not [a for a, b in pairwise(sorted(names)) if a == b]
