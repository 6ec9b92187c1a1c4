"""Guesses change the speed and nothing else: text, reasons to end, and what memory holds afterwards."""
from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ggraph import env
from ggraph.errors import Error, ModelError
from ggraph.generate import LLM, Generation, ModelDraft, NgramDraft
from ggraph.grammar import Grammar
from ggraph.model import Model
from ggraph.sampling import Sampler
from tests import spec, tiny

NAMES = ("llama-dense-b", "gemma3-dense-b", "qwen35-dense-b")
PROMPTS = [[random.Random(i).randrange(128) for _ in range(n)] for i, n in enumerate((1, 2, 17, 40))]
GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 7, "repeat_penalty": 1.1}


class Always:
    """Guesses one token, right or wrong."""

    def __init__(self, token: int = 3):
        self.token = token

    def propose(self, tokens: Sequence[int], n: int, sampler: Sampler) -> list[int]:
        return [self.token] * n

    def abort(self) -> None: ...


class Oracle(Always):
    """Knows the text to come, and errs in every `wrong`-th token."""

    def __init__(self, text: Sequence[int], wrong: int):
        self.text, self.wrong = list(text), wrong

    def propose(self, tokens: Sequence[int], n: int, sampler: Sampler) -> list[int]:
        return [(t + (i % self.wrong == 0)) % 128 for i, t in enumerate(self.text)][len(tokens):len(tokens) + n]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Model]]:
    folder = tmp_path_factory.mktemp("models")
    opened = {n: Model(spec.write(spec.specs()[n], folder / f"{n}.gguf")) for n in NAMES}
    yield opened
    for model in opened.values():
        model.close()


@pytest.fixture(params=[*((name, 6) for name in NAMES), ("qwen35-dense-b", 0), ("qwen35-dense-b", 2)],
                ids=lambda p: f"{p[0]}-{p[1]}")
def any_llm(request: pytest.FixtureRequest, models: dict[str, Model]) -> Iterator[LLM]:
    name, n_rollback = request.param
    with LLM(models[name], n_ctx=256, n_batch=64, n_ubatch=32, n_rollback=n_rollback) as llm:
        yield llm


def outcome(g: Generation) -> tuple[Any, ...]:
    text = g.read()
    return text, g.tokens, g.finish_reason, g.stop_type, g.stopping_word, list(g._history.tokens), g.logprobs and len(g.logprobs)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_the_text_is_that_of_plain_decoding(any_llm: LLM, sampling: dict[str, Any]) -> None:
    for prompt in PROMPTS:
        options = {"max_tokens": 24, "logprobs": 0, **sampling}
        want = outcome(any_llm.generate(prompt, **options))
        whole = [*prompt, *want[1]]
        drafters: list[Any] = [NgramDraft(least=1), Always(), *(Oracle(whole, wrong) for wrong in (2, 3, 5, 99))]
        for drafter in drafters:
            g = any_llm.generate(prompt, draft=drafter, n_draft=6, **options)
            assert outcome(g) == want
            assert g.timings.eval_n == 23 and g.timings.sample_n == 24
            stores = any_llm.ctx.memory.stores
            assert all(s.seq_pos_max(0) == len(whole) - 2 for s in stores)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_with_the_same_model_every_draft_is_accepted(any_llm: LLM, sampling: dict[str, Any]) -> None:
    if env.get("GGRAPH_BACKEND") == "ref":
        pytest.skip("BLAS sums in an order that depends on the shape")
    for prompt in PROMPTS:
        want = any_llm.generate(prompt, max_tokens=24, **sampling).read()
        g = any_llm.generate(prompt, max_tokens=24, draft=any_llm.model, n_draft=6, **sampling)
        assert g.read() == want
        assert g.timings.draft_n == g.timings.draft_n_accepted >= 15


def test_a_text_that_repeats_itself(llm: LLM) -> None:
    prompt = llm.vocab.encode("the rain in the air, ") * 6
    bias = {i: -1e9 for i in range(llm.model.n_vocab) if i != 264}
    g = llm.generate(prompt, max_tokens=60, draft="ngram", temperature=0.0, logit_bias=bias)
    g.read()
    assert g.tokens == [264] * 60
    assert g.timings.draft_n_accepted >= 0.6 * g.timings.draft_n > 0


def test_ngrams() -> None:
    none: Any = None
    assert NgramDraft(least=2).propose([1, 2, 3, 9, 2, 3], 3, none) == [9, 2, 3]
    assert NgramDraft(least=2).propose([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3], 2, none) == [7, 9]           # the longest match
    assert NgramDraft(least=2, size_n=2).propose([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3], 2, none) == [8, 1]   # the last of equals
    assert NgramDraft(least=3).propose([1, 2, 3, 9, 2, 3], 3, none) == []
    assert NgramDraft(least=1).propose([5, 5], 4, none) == [5] * 4
    assert NgramDraft(least=1, size_m=2).propose([5, 5], 4, none) == [5] * 2
    assert NgramDraft().propose([5], 4, none) == []


def test_ends_inside_an_accepted_run(llm: LLM) -> None:
    prompt = llm.vocab.encode("the rain in an")
    whole = llm.generate(prompt, max_tokens=30, **GREEDY)
    text = whole.read()
    ends: list[dict[str, Any]] = [{"max_tokens": n} for n in (0, 1, 2, 7, 8, 9)]
    ends += [{"stop": text[at:at + 3], "max_tokens": 30} for at in range(0, len(text) - 3, 3)]
    ends += [{"logit_bias": {tiny.EOS: b}, "max_tokens": 30} for b in (0.2, 0.5, 1.0, 1000.0)]
    for end in ends:
        want = outcome(llm.generate(prompt, **GREEDY, **end))
        drafts: list[Any] = [llm.model, Oracle([*prompt, *whole.tokens], 99), Always(tiny.EOS)]
        for draft in drafts:
            assert outcome(llm.generate(prompt, draft=draft, **GREEDY, **end)) == want, end


def test_a_grammar_holds(llm: LLM) -> None:
    options: dict[str, Any] = {"max_tokens": 30, "temperature": 1.0, "seed": 3}
    rule = 'root ::= ("the " | "rain " | "in ")+ "."'
    want = outcome(llm.generate("the rain", grammar=Grammar.gbnf(llm.vocab, rule), **options))
    drafts: list[Any] = ["ngram", llm.model, Always(264)]
    for draft in drafts:
        assert outcome(llm.generate("the rain", draft=draft, grammar=Grammar.gbnf(llm.vocab, rule), **options)) == want


@pytest.mark.parametrize("shift", [False, True])
def test_the_context_fills(llm: LLM, shift: bool) -> None:
    options: dict[str, Any] = {"ignore_eos": True, "seed": 1, "context_shift": shift, "max_tokens": 300}
    want = outcome(llm.generate("the rain", **options))
    drafts: list[Any] = ["ngram", llm.model, Always()]
    for draft in drafts:
        assert outcome(llm.generate("the rain", draft=draft, **options)) == want


def test_a_turn_goes_on_from_what_was_accepted(models: dict[str, Model]) -> None:
    with LLM(models["qwen35-dense-b"], n_ctx=256, n_rollback=4) as llm:
        g = llm.generate(PROMPTS[2], max_tokens=10, draft=llm.model, **GREEDY)
        g.read()
        turn = [*PROMPTS[2], *g.tokens, 5, 6]
        again = llm.generate(turn, max_tokens=4, **GREEDY)
        again.read()
        assert again.timings.cache_n == len(turn) - 3


def test_stopping(llm: LLM) -> None:
    g = llm.generate("the rain", draft="ngram", ignore_eos=True, seed=1)
    for _ in range(20):
        next(g)
    g.stop()
    assert (list(g)[1:], g.finish_reason) == ([], "cancelled")
    assert len(g._history.tokens) == llm.ctx.memory.seq_pos_max(0) + 1 <= len(g.prompt) + len(g.tokens)


def test_the_draft_models_own_limits(llm: LLM, tmp_path: Path) -> None:
    want = llm.generate("the rain", max_tokens=30, **GREEDY).read()
    with LLM(llm.model, n_ctx=256) as other:
        for options in ({"n_min": 9}, {"p_min": 0.99}):
            g = llm.generate("the rain", max_tokens=30, draft=ModelDraft(other.ctx, **options), **GREEDY)
            assert (g.read(), g.timings.draft_n) == (want, 0)
        g = llm.generate("the rain", max_tokens=30, draft=other, n_draft=3, **GREEDY)
        assert g.read() == want and g.timings.draft_n > 15
    with pytest.raises(Error, match="its own context"):
        llm.generate("a", draft=llm)
    with pytest.raises(Error, match="must be 'ngram'"):
        llm.generate("a", draft="ngrams")


def test_another_vocabulary_is_refused(llm: LLM, models: dict[str, Model], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot draft for this model, whose vocabulary is another: kind spm and test"):
        llm.generate("a", draft=models["llama-dense-b"])
    tokens = [*tiny.TOKENS[:-1], "▁on"]
    with Model(tiny.write(tmp_path / "m.gguf", tokenizer__ggml__tokens=tokens)) as model, \
            pytest.raises(ModelError, match="is '▁in' and '▁on'"):
        llm.generate("a", draft=model)
