"""Speculative decoding of 20 prompts on dense, sliding-window and hybrid models: the text is plain decoding's, whatever guesses."""
from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ggraph import env
from ggraph.generate import LLM
from tests import spec

N_PROMPTS = 20
WORDS = ["the", "rain", "river", "stones", "and", "light", "old", "houses", "in", "spring", "children", "sing", "about", "ships",
         "sail", "to", "north", "winter", "again", "def", "return", "for", "while", "1", "2", "3", "print", "list", "value", "name"]
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.9, "seed": 11, "repeat_penalty": 1.1}}
SENTENCE = "The quick brown fox jumps over the lazy dog near the old mill by the river. "


def prompts(kind: str) -> list[str | list[int]]:
    """Of words; for a model without a tokenizer, of token ids. Every second one repeats itself."""
    found: list[str | list[int]] = []
    for i in range(N_PROMPTS):
        rng = random.Random(i)
        n, times = 4 + 3 * (i % 7), 1 + 2 * (i % 2)
        ids: list[int] = [rng.randrange(128) for _ in range(n)] * times
        found.append(ids if kind == "hybrid" else " ".join([rng.choice(WORDS) for _ in range(n)] * times))
    return found


@pytest.fixture(scope="module", params=["dense", "window", "hybrid"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def llm(kind: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path: Path = (spec.write(spec.specs()["qwen35-dense-b"], tmp_path_factory.mktemp("m") / "m.gguf") if kind == "hybrid"
                  else request.getfixturevalue({"dense": "smollm2", "window": "gemma3"}[kind]))
    with LLM(path, n_ctx=768, n_ubatch=64, n_seq_max=3, n_rollback=6, n_threads=2) as llm:
        yield llm


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLING)
def test_20_prompts(kind: str, llm: LLM, sampling: str) -> None:
    accepted: dict[str, int] = {}
    for prompt in prompts(kind):
        options = {"max_tokens": 24, **SAMPLING[sampling]}
        want = llm.generate(prompt, **options)
        want.read()
        guessed: Sequence[tuple[str, dict[str, Any]]] = (
            ("ngram", {"draft": "ngram"}), ("tree", {"draft": "ngram", "n_branch": 3}), ("itself", {"draft": llm.model}),
            ("itself, tree", {"draft": llm.model, "n_branch": 3}))
        for name, how in guessed:
            g = llm.generate(prompt, n_draft=6, **how, **options)
            g.read()
            assert (g.text, g.tokens, g.finish_reason) == (want.text, want.tokens, want.finish_reason), (prompt, name)
            accepted[name] = accepted.get(name, 0) + g.timings.draft_n_accepted
            if name == "itself" and env.get("GGRAPH_BACKEND") != "ref":
                assert g.timings.draft_n_accepted == g.timings.draft_n, prompt
    assert all(accepted[name] for name in accepted if name.startswith("itself") or kind != "hybrid")    # random ones repeat nothing


@pytest.mark.parametrize("n", [pytest.param(160, marks=pytest.mark.slow), 32])
def test_a_text_that_repeats_itself(smollm2: Path, n: int) -> None:
    """Of the guesses that repeat it, at least 60% are right."""
    with LLM(smollm2, n_ctx=768, n_threads=2) as llm:
        prompt = SENTENCE * 6
        want = llm.generate(prompt, max_tokens=n, temperature=0.0).read()
        g = llm.generate(prompt, max_tokens=n, temperature=0.0, draft="ngram")
        assert g.read() == want
        assert g.timings.draft_n_accepted >= 0.6 * g.timings.draft_n > 0
