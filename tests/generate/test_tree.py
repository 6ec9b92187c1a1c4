"""Guesses on several branches: one run judges them all, and text and memory are those of plain decoding."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ggraph.errors import Error
from ggraph.generate import LLM, MtpDraft, NgramDraft
from ggraph.generate.speculative import Guess
from ggraph.model import Model
from ggraph.sampling import Sampler
from tests import nextn, spec
from tests.generate.test_speculative import GREEDY, NAMES, PROMPTS, SEEDED, Oracle, outcome


class Forest(Oracle):
    """Knows the text to come: branch `at` is right for `right` tokens, the others for fewer."""

    def __init__(self, text: Sequence[int], at: int, right: int):
        super().__init__(text, 99)
        self.at, self.right = at, right

    def branches(self, tokens: Sequence[int], n: int, most: int, sampler: Sampler) -> list[list[int]]:
        text = self.text[len(tokens):len(tokens) + n]
        lengths = [self.right if i == self.at else i % self.right for i in range(most)]
        return [[t if i < good else (t + 1 + branch) % 128 for i, t in enumerate(text)] for branch, good in enumerate(lengths)]


@pytest.fixture(params=[*((name, 6) for name in NAMES), ("qwen35-dense-b", 0), ("qwen35-dense-b", 4)],
                ids=lambda p: f"{p[0]}-{p[1]}")
def llm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LLM]:
    name, n_rollback = request.param
    with Model(spec.write(spec.specs()[name], tmp_path / "m.gguf")) as model, \
            LLM(model, n_ctx=256, n_batch=64, n_ubatch=32, n_rollback=n_rollback, n_seq_max=4) as llm:
        yield llm


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_the_text_is_that_of_plain_decoding(llm: LLM, sampling: dict[str, Any]) -> None:
    for prompt in PROMPTS[1:]:
        options = {"max_tokens": 24, "logprobs": 0, **sampling}
        want = outcome(llm.generate(prompt, **options))
        whole = [*prompt, *want[1]]
        drafters: list[Any] = [NgramDraft(least=1), *(Forest(whole, at, right) for at, right in ((0, 6), (1, 4), (2, 1), (3, 6)))]
        for drafter in drafters:
            g = llm.generate(prompt, draft=drafter, n_draft=6, n_branch=4, **options)
            assert outcome(g) == want
            memory = llm.ctx.memory
            assert all(s.seq_pos_max(0) == len(whole) - 2 for s in memory.stores)
            assert [memory.seq_pos_max(s) for s in (1, 2, 3)] == [-1] * 3


def test_the_right_branch_is_taken_whole(llm: LLM) -> None:
    want = llm.generate(PROMPTS[2], max_tokens=25, **GREEDY)
    want.read()
    n = min(6, llm.ctx.cparams.n_rollback or 6) if llm.ctx.memory.rs else 6
    for at in range(4):
        draft = Forest([*PROMPTS[2], *want.tokens], at, 6)
        g = llm.generate(PROMPTS[2], draft=draft, n_draft=6, n_branch=4, max_tokens=25, **GREEDY)
        g.read()
        assert g.tokens == want.tokens
        assert g.timings.draft_n_accepted >= 24 * n // (n + 1) - 1


def test_a_tree_has_common_starts_once() -> None:
    nodes = Guess.tree(9, [[1, 2, 3], [1, 2, 4], [5]], [0, 7, 8])
    assert [n.text for n in nodes] == [[9], [9, 1], [9, 1, 2], [9, 1, 2, 3], [9, 1, 2, 4], [9, 5]]
    assert [n.seqs for n in nodes] == [[0, 7, 8], [0, 7], [0, 7], [0], [7], [8]]
    assert [n.row for n in nodes] == list(range(6))
    assert (nodes[0].count(), nodes[2].count(), nodes[5].count()) == (5, 2, 0)


def test_ngrams_that_went_on_differently() -> None:
    none: Any = None
    text = [1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3, 7, 5, 2, 3]
    assert NgramDraft(least=1).branches(text, 2, 3, none) == [[7, 5], [8, 1]]
    assert NgramDraft(least=1).branches([*text, 6, 1, 2, 3], 1, 3, none) == [[7], [6], [8]]
    assert NgramDraft(least=2).branches(text, 2, 1, none) == [NgramDraft(least=2).propose(text, 2, none)]


def test_drafters_that_have_a_second_thought(tmp_path: Path) -> None:
    """A token that is likely, too, stands on a branch of its own, and the text may take it."""
    with LLM(Model(nextn.write("glm4moe-moe", tmp_path / "m.gguf")), n_ctx=256, n_seq_max=3) as llm:
        for sampling in (GREEDY, {"temperature": 1.0, "seed": 3}):
            want = llm.generate(PROMPTS[2], max_tokens=24, **sampling).read()
            for draft in (llm.model, "mtp"):
                g = llm.generate(PROMPTS[2], max_tokens=24, draft=draft, n_draft=3, n_branch=3, **sampling)
                assert g.read() == want and g.timings.draft_n > 0
        sampler = llm.sampler(temperature=0.0)
        text = [*llm._history.tokens, 5]
        found = MtpDraft(llm.nextn).branches(text, 3, 3, sampler.clone())
        assert found[0] == MtpDraft(llm.nextn).propose(text, 3, sampler)
        assert all(branch[:-1] == found[0][:len(branch) - 1] and branch[-1] != found[0][len(branch) - 1] for branch in found[1:])
        llm.model.close()


def test_branches_need_sequences(tmp_path: Path) -> None:
    path = spec.write(spec.specs()["llama-dense"], tmp_path / "m.gguf")
    with LLM(str(path), n_ctx=256, n_seq_max=2) as llm, pytest.raises(Error, match="n_branch is 3; the context has 2 sequences"):
        llm.generate([1], draft="ngram", n_branch=3)
    with LLM(str(path), n_ctx=256, n_seq_max=2, kv_unified=False) as llm, pytest.raises(Error, match="kv_unified=True"):
        llm.generate([1], draft="ngram", n_branch=2)
