"""LLM: parameters of the sampler, chat, scores, embeddings."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ggraph
from ggraph.errors import ContextFull, Error, GGUFError, SamplerError, TemplateError
from ggraph.generate import LLM
from ggraph.model import Model
from tests import adapters, tiny

MESSAGES = [{"role": "user", "content": "the rain"}]


def words(llm: LLM, **params: object) -> list[str]:
    return llm.sampler(**params).chain.split(";")  # type: ignore[arg-type]


def test_defaults_are_llama_cpps(llm: LLM) -> None:
    assert words(llm)[-1] == "dist -1"
    assert "top_k 40" in words(llm) and "temp_ext 0.8 0.0 1.0" in words(llm)
    assert "top_k 7" in words(llm, top_k=7)
    assert words(llm, top_k=None) == words(llm)
    assert "temp_ext 0.5 0.0 1.0" in words(llm, temperature=0.5)


def test_the_file_may_have_defaults_of_its_own(tmp_path: Path) -> None:
    keys = {"general__sampling__temp": 0.25, "general__sampling__top_k": 3, "general__sampling__penalty_last_n": 16,
            "general__sampling__sequence": "top_k;temperature"}
    with LLM(tiny.write(tmp_path / "m.gguf", **keys), n_ctx=256) as llm:
        assert words(llm) == ["top_k 3", "temp_ext 0.25 0.0 1.0", "dist -1"]
        assert words(llm, top_k=5, temperature=1.0, seed=4) == ["top_k 5", "temp_ext 1.0 0.0 1.0", "dist 4"]


def test_ignore_eos_bans_every_end(llm: LLM) -> None:
    assert words(llm, ignore_eos=True, logit_bias={7: 1.0})[0] == "logit_bias 7 1.0 2 -inf 4 -inf"


def test_unknown_parameters_are_named(llm: LLM) -> None:
    with pytest.raises(SamplerError, match="unknown sampling parameter 'top_q'"):
        llm.generate("a", top_q=3)


def test_a_sampler_of_ones_own(llm: LLM) -> None:
    sampler = ggraph.Sampler("logit_bias 264 1000", n_vocab=llm.model.n_vocab)
    g = llm.generate("a", max_tokens=3, sampler=sampler)
    g.read()
    assert g.tokens == [264] * 3


def test_chat_goes_through_the_template(llm: LLM) -> None:
    g = llm.chat(MESSAGES, max_tokens=3, temperature=0.0)
    text = "<|im_start|>user\nthe rain<|im_end|>\n<|im_start|>assistant\n"
    assert g.prompt == llm.vocab.encode(text) and g.prompt[0] == tiny.BOS
    assert g.read() == llm.generate(text, max_tokens=3, temperature=0.0).read()


def test_bos_is_there_once(model: Model) -> None:
    template = ggraph.ChatTemplate("{{ bos_token }}{{ messages[0].content }}{{ extra }}", bos_token="<s>")
    with LLM(model, chat_template=template, n_ctx=256) as llm:
        g = llm.chat([{"role": "user", "content": "a"}], template_kwargs={"extra": "e"})
        assert g.prompt == llm.vocab.encode("ae")


def test_no_template(tmp_path: Path) -> None:
    with LLM(tiny.write(tmp_path / "m.gguf", tokenizer__chat_template=None), n_ctx=256) as llm, \
            pytest.raises(TemplateError, match="has no chat template"):
        llm.chat(MESSAGES)


def test_scores_are_log_softmax(llm: LLM) -> None:
    ids = [1, *range(5, 50)]
    scores = llm.score(ids)
    assert [s.token for s in scores] == ids[1:]
    batch = ggraph.Batch()
    for pos, token in enumerate(ids):
        batch.add(token, pos, 0, output=True)
    llm.ctx.memory.clear()
    llm.ctx.process("decode", batch)
    rows = np.array(llm.ctx.logits, np.float64)
    want = rows[np.arange(len(ids) - 1), ids[1:]] - np.log(np.exp(rows[:-1]).sum(1))
    np.testing.assert_allclose([s.logprob for s in scores], want, atol=1e-4)


def test_score_of_text(llm: LLM) -> None:
    assert [s.token for s in llm.score("the rain")] == llm.vocab.encode("the rain")[1:]
    assert llm.score("") == []
    seen: list[tuple[int, int]] = []
    llm.score([5] * 40, progress=lambda *at: seen.append(at))
    assert seen[-1] == (40, 40)
    with pytest.raises(ContextFull, match="has 257 tokens, the context holds 256"):
        llm.score([5] * 257)


def test_texts_after_a_score(llm: LLM) -> None:
    want = llm.generate("the rain", max_tokens=5, temperature=0.0).read()
    llm.score("in the air")
    assert llm.generate("the rain", max_tokens=5, temperature=0.0).read() == want


def test_embeddings(llm: LLM) -> None:
    texts = ["the rain", "in the air", "the rain"]
    rows = llm.embed(texts)
    assert rows.shape == (3, tiny.N_EMBD) and rows.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(rows[0], rows[2])
    assert not np.allclose(rows[0], rows[1])
    plain, last = llm.embed(texts, normalize=False), llm.embed(texts, pooling="last")
    np.testing.assert_allclose(plain / np.linalg.norm(plain, axis=1, keepdims=True), rows, atol=1e-6)
    assert not np.allclose(rows[0], last[0])
    assert llm.embed([]).shape == (0, tiny.N_EMBD)


def test_embeddings_follow_the_adapters(model: Model, tmp_path: Path) -> None:
    vector = adapters.write_vector(tmp_path / "v.gguf", {1: np.ones(tiny.N_EMBD, np.float32)})
    with LLM(model, n_ctx=256) as llm:
        plain = llm.embed(["the rain"])
        llm.ctx.set_adapters([(ggraph.Adapter(vector), 2.0)])
        assert not np.allclose(llm.embed(["the rain"]), plain)
        llm.ctx.set_adapters([])
        np.testing.assert_array_equal(llm.embed(["the rain"]), plain)


def test_embeddings_that_cannot_be(llm: LLM) -> None:
    with pytest.raises(Error, match="list of texts"):
        llm.embed("the rain")
    with pytest.raises(Error, match="pooling"):
        llm.embed(["a"], pooling="none")
    with pytest.raises(ContextFull, match="1 to 256"):
        llm.embed(["the rain " * 100])


def test_a_model_that_is_given_stays_open(model: Model) -> None:
    LLM(model, n_ctx=256).close()
    with LLM(model, n_ctx=256) as llm:
        assert llm.generate("a", max_tokens=1).read() is not None


def test_a_model_that_does_not_open_leaves_nothing_open(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0")
    with pytest.raises(GGUFError):
        LLM(path)
    with pytest.raises(Error):
        LLM(tiny.write(tmp_path / "m.gguf"), n_ctx=-1)
