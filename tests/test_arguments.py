"""Arguments of a wrong type are told at the boundary, by name: an `ArgumentError`, which is a TypeError as well."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ggraph
from ggraph import Batch, Context, Sampler
from tests import tiny

Wrong = Callable[[Any], object]
WRONG: dict[str, Wrong] = {
    "token is 'a'": lambda llm: Batch().add("a", 0, 0),                             # type: ignore[arg-type]
    "token is 1.5": lambda llm: Batch().add(1.5, 0, 0),                             # type: ignore[arg-type]
    "pos is 'x'": lambda llm: Batch().add(1, "x", 0),                               # type: ignore[arg-type]
    "seq_id is None": lambda llm: Batch().add(1, 0, None),                          # type: ignore[arg-type]
    "embedding 0 is not a vector": lambda llm: Batch().add_embd("abc", 0, 0),
    "model is 'x'": lambda llm: Context("x"),                                       # type: ignore[arg-type]
    "n_ctx is 'x'": lambda llm: Context(llm.model, n_ctx="x"),                      # type: ignore[arg-type]
    "n_ubatch is None": lambda llm: Context(llm.model, n_ubatch=None),              # type: ignore[arg-type]
    "n_threads is 1.5": lambda llm: Context(llm.model, n_threads=1.5),              # type: ignore[arg-type]
    "on_node is 5": lambda llm: Context(llm.model, on_node=5),                      # type: ignore[arg-type]
    "rope is 5": lambda llm: Context(llm.model, rope=5),                            # type: ignore[arg-type]
    "rope option scale is 'x'": lambda llm: Context(llm.model, rope={"scale": "x"}),
    "batch is 5": lambda llm: llm.ctx.process("decode", 5),
    "a sequence is 'a'": lambda llm: llm.ctx.memory.seq_pos_max("a"),
    "chain is 5": lambda llm: Sampler(5, n_vocab=5),                                # type: ignore[arg-type]
    "n_vocab is 'x'": lambda llm: Sampler("greedy", n_vocab="x"),                   # type: ignore[arg-type]
    "not a row of numbers": lambda llm: Sampler("greedy", n_vocab=5).sample("abc"),     # type: ignore[arg-type]
    "token is None": lambda llm: Sampler("greedy", n_vocab=5).accept(None),         # type: ignore[arg-type]
    "prompt is 123": lambda llm: llm.generate(123),
    "a token of the prompt is 'a'": lambda llm: llm.generate(["a"]),
    "max_tokens is 'x'": lambda llm: llm.generate("the", max_tokens="x"),
    "stop is 5": lambda llm: llm.generate("the", stop=5),
    "a stop string is 5": lambda llm: llm.generate("the", stop=[5]),
    "text is 5": lambda llm: llm.score(5),
    "messages is 5": lambda llm: ggraph.ChatTemplate("x").render(5),                # type: ignore[arg-type]
    "text is None": lambda llm: llm.vocab.encode(None),
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ggraph.LLM]:
    with ggraph.LLM(tiny.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf"), n_ctx=256) as llm:
        yield llm


@pytest.mark.parametrize("told", WRONG)
def test_a_wrong_type_is_told_by_name(told: str, llm: ggraph.LLM) -> None:
    with pytest.raises(ggraph.ArgumentError, match=told) as e:
        WRONG[told](llm)
    assert isinstance(e.value, TypeError) and len(e.value.args[0]) < 120


def test_a_list_of_texts_is_embedded(llm: ggraph.LLM) -> None:
    with pytest.raises(ggraph.Error, match="embed takes a list of texts"):
        llm.embed(5)                                                                # type: ignore[arg-type]


def test_a_type_that_is_no_name(llm: ggraph.LLM) -> None:
    with pytest.raises(ggraph.Error, match="unknown type 5"):
        Context(llm.model, type_k=5)                                                # type: ignore[arg-type]
