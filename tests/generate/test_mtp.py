"""Drafts of the model's own block for next-token prediction: the text stays, and a block that is right is believed."""
from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggraph.batch import Batch
from ggraph.errors import ModelError
from ggraph.generate import LLM, History, MtpDraft, Nextn, Speculation
from ggraph.model import Model
from tests import nextn, spec
from tests.generate.test_speculative import GREEDY, PROMPTS, SEEDED, outcome


def right(name: str) -> dict[str, np.ndarray]:
    """Weights of a model whose next token depends on the last one alone, and of a block that knows this."""
    shapes = {t: shape for t, shape, _ in nextn.nextn_spec(name)["tensors"]}
    n = shapes["output_norm.weight"][0]
    mute = ("attn_output", "ffn_down", "ssm_out", "ffn_down_exps", "ffn_down_shexp")
    given = {t: np.zeros(shape[::-1], np.float32) for t, shape in shapes.items() if any(f".{m}." in t for m in mute)}
    block = next(t for t in shapes if t.endswith("nextn.eh_proj.weight")).removesuffix("eh_proj.weight")
    given[block + "eh_proj.weight"] = np.eye(n, 2 * n, dtype=np.float32)                # the token's embedding goes on
    given[block + "enorm.weight"] = np.ones(n, np.float32)
    layer = block.removesuffix("nextn.")
    norm = next((t for t in (block + "shared_head_norm.weight", layer + "layer_output_norm.weight") if t in shapes), None)
    if norm:                                                                            # else it is the model's own
        given[norm] = spec.weights("output_norm.weight", [n])
    embd = spec.weights("token_embd.weight", shapes["token_embd.weight"])
    given["token_embd.weight"] = embd - embd.mean(-1, keepdims=True)                    # all kinds of norms are one then
    return given


@pytest.fixture(scope="module", params=nextn.NAMES)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Model, Model]]:
    """With a random block, and with one that is right."""
    folder = tmp_path_factory.mktemp("models")
    with Model(nextn.write(request.param, folder / "a.gguf")) as a, \
            Model(nextn.write(request.param, folder / "b.gguf", right(request.param))) as b:
        yield a, b


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_the_text_is_that_of_plain_decoding(models: tuple[Model, Model], sampling: dict[str, Any]) -> None:
    for model, n_rollback in ((models[0], 3), (models[0], 0), (models[1], 3)):
        with LLM(model, n_ctx=256, n_batch=64, n_ubatch=16, n_rollback=n_rollback) as llm:
            for n_draft, prompt in enumerate(PROMPTS[1:], 1):
                options = {"max_tokens": 16, "logprobs": 0, **sampling}
                want = outcome(llm.generate(prompt, **options))
                g = llm.generate(prompt, draft="mtp", n_draft=n_draft, **options)
                assert outcome(g) == want
                assert g.timings.draft_n > 0


@pytest.mark.parametrize("sampling", [GREEDY, {"temperature": 1.5, "seed": 7}], ids=["greedy", "seeded"])
def test_a_block_that_is_right_is_believed(models: tuple[Model, Model], sampling: dict[str, Any]) -> None:
    with LLM(models[1], n_ctx=256, n_rollback=3) as llm:
        for prompt in PROMPTS[1:]:
            g = llm.generate(prompt, draft="mtp", n_draft=3, max_tokens=24, **sampling)
            g.read()
            assert g.timings.draft_n == g.timings.draft_n_accepted >= 16


def test_what_it_guesses_depends_on_the_text_alone(models: tuple[Model, Model]) -> None:
    """Not on the batches in which the text came, nor on rejected guesses, other turns and sequences before."""
    def guesses(llm: LLM, text: list[int]) -> list[int]:
        return MtpDraft(llm.nextn).propose([*text, 5], 4, llm.sampler(temperature=0.0, ignore_eos=True))
    text = [random.Random(9).randrange(128) for _ in range(40)]
    with LLM(models[0], n_ctx=256, n_rollback=3) as llm:
        assert guesses(llm, text) == []                                                 # it has not followed
        history = History(llm.ctx)
        history.add(text)
        want = guesses(llm, text)
        assert len(want) == 4 == len(guesses(llm, text))
        history.clear()
        history.add(text[:7])
        for token in text[7:30]:
            guesses(llm, text[:history.ctx.memory.seq_pos_max(0) + 1])
            history.add([token])
        ahead = Speculation(history)
        ahead.evaluate(text[30], [[1, 2, 3]])
        assert not ahead.judge(text[31])
        history.add(text[31:])
        assert guesses(llm, text) == want


def test_sequences_have_guesses_of_their_own(models: tuple[Model, Model]) -> None:
    texts = [[random.Random(i).randrange(128) for _ in range(12 + i)] for i in range(3)]
    with LLM(models[0], n_ctx=256, n_rollback=3) as llm:
        sampler = llm.sampler(temperature=0.0)
        alone = []
        for text in texts:
            block, history = llm.nextn, History(llm.ctx)
            llm.ctx.memory.clear()
            history.add(text)
            alone.append(MtpDraft(block).propose([*text, 5], 3, sampler.clone()))
    with LLM(models[0], n_ctx=768, n_rollback=3, n_seq_max=3) as llm:
        block = Nextn(llm.ctx)
        for s, text in enumerate(texts):
            History(llm.ctx, s).add(text)
        assert [MtpDraft(block, s).propose([*text, 5], 3, sampler.clone()) for s, text in enumerate(texts)] == alone
        for s in (0, 1):                                                                # a sequence that goes on from another
            llm.ctx.memory.seq_cp(2, s)
        assert MtpDraft(block, 0).propose([*texts[2], 5], 3, sampler.clone()) == alone[2]
        batch = Batch()
        batch.add(5, len(texts[2]), (0, 1), output=True)
        llm.ctx.process("decode", batch)
        assert [MtpDraft(block, s).propose([*texts[2], 5, 6], 3, sampler.clone()) for s in (0, 1)] == [
            MtpDraft(block, 0).propose([*texts[2], 5, 6], 3, sampler.clone())] * 2
        block.ctx.close()


def test_turns_and_shifts(models: tuple[Model, Model]) -> None:
    options: dict[str, Any] = {"ignore_eos": True, "seed": 1, "context_shift": True, "max_tokens": 300, "temperature": 1.0}
    with LLM(models[1], n_ctx=256, n_rollback=3) as llm:
        want = outcome(llm.generate(PROMPTS[2], **options))
        assert outcome(llm.generate(PROMPTS[2], draft="mtp", n_draft=3, **options)) == want
        turn = [*PROMPTS[2], *want[1][:20], 7]
        first = outcome(llm.generate(turn, max_tokens=8, **GREEDY))
        g = llm.generate(turn, max_tokens=8, draft="mtp", **GREEDY)
        assert outcome(g) == first and g.timings.draft_n_accepted > 0


def test_a_model_without_one(tmp_path: Path) -> None:
    with LLM(str(spec.write(spec.specs()["llama-dense"], tmp_path / "m.gguf")), n_ctx=256) as llm, \
            pytest.raises(ModelError, match="m.gguf holds no block"):
        llm.generate([1], draft="mtp")
