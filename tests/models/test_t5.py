"""An encoder and a decoder beside llama.cpp's: tests/golden/models/t5.npz, made by bench/make_goldens.py."""
from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggraph
from ggraph.serve import Engine
from tests import spec, t5

GOLDEN = np.load(spec.FOLDER / "t5.npz")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ggraph.Model]:
    folder = tmp_path_factory.mktemp("t5")
    return {name: ggraph.Model(spec.write(what, folder / f"{name}.gguf")) for name, what in t5.SPECS.items()}


def run(ctx: ggraph.Context, kind: str, rows: Iterable[tuple[int, int, int]]) -> Any:
    batch = ggraph.Batch()
    for token, _, seq in rows:
        batch.add(token, None, seq, output=True)
    ctx.process(kind, batch)
    return np.array(ctx.embeddings if kind == "encode" else ctx.logits)


def nmse(got: np.ndarray, want: np.ndarray) -> float:
    return float(((got - want) ** 2).sum() / (want ** 2).sum())


def logits(model: ggraph.Model, **options: Any) -> np.ndarray:
    """Of the decoder's batches, after both texts were encoded together."""
    with ggraph.Context(model, **{"n_ctx": t5.N_CTX, "n_seq_max": 2, **options}) as ctx:
        run(ctx, "encode", t5.text())
        return np.concatenate([run(ctx, "decode", rows) for rows in t5.batches()])


@pytest.mark.parametrize("backend", ["cpu", "ref"])
@pytest.mark.parametrize("flash_attn", ["off", "on"])
@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("name", t5.SPECS)
def test_its_logits_are_those_of_llama_cpp(models: dict[str, ggraph.Model], name: str, unified: bool, flash_attn: str,
                                           backend: str) -> None:
    with ggraph.Model(models[name].path, backend=backend) as model:
        assert nmse(logits(model, kv_unified=unified, flash_attn=flash_attn), GOLDEN[name]) < 1e-5


@pytest.mark.parametrize("name", t5.SPECS)
def test_a_sequence_alone_gives_what_it_gives_in_company(models: dict[str, ggraph.Model], name: str) -> None:
    both = np.split(logits(models[name]), np.cumsum([len(rows) for rows in t5.batches()])[:-1])
    lone = []
    for s in range(2):
        with ggraph.Context(models[name], n_ctx=t5.N_CTX, n_ubatch=3) as ctx:
            run(ctx, "encode", [(t, p, 0) for t, p, seq in t5.text() if seq == s])
            lone.append([run(ctx, "decode", [(t, p, 0) for t, p, seq in rows if seq == s]) for rows in t5.batches()])
    for i, rows in enumerate(both):
        assert nmse(rows, np.concatenate([lone[0][i], lone[1][i]])) < 1e-9


def test_the_next_text_takes_the_place_of_the_last(models: dict[str, ggraph.Model]) -> None:
    first, second = t5.text()[:13], [(t + 1, p, 0) for t, p, _ in t5.text()[:7]]
    answer = t5.batches()[0][:4]
    with ggraph.Context(models["t5"], n_ctx=t5.N_CTX) as ctx:
        rows = []
        for text in (first, second, first):
            assert run(ctx, "encode", text).shape == (len(text), ctx.model.hparams.n_embd)
            ctx.memory.seq_rm(0)
            rows.append(run(ctx, "decode", answer))
    assert np.array_equal(rows[0], rows[2]) and nmse(rows[0], rows[1]) > 1e-2


def test_a_copy_of_a_sequence_answers_the_same_text(models: dict[str, ggraph.Model]) -> None:
    with ggraph.Context(models["t5"], n_ctx=t5.N_CTX, n_seq_max=2) as ctx:
        run(ctx, "encode", t5.text()[:13])
        run(ctx, "decode", [(5, 0, 0), (6, 1, 0)])
        ctx.memory.seq_cp(0, 1)
        rows = run(ctx, "decode", [(7, 2, 0), (7, 2, 1)])
    assert nmse(rows[1], rows[0]) < 1e-9


def test_what_cannot_be_is_said(models: dict[str, ggraph.Model], tmp_path: Path) -> None:
    model = models["t5"]
    with ggraph.Context(model, n_ctx=t5.N_CTX, n_seq_max=2) as ctx:
        with pytest.raises(ggraph.BatchError, match="sequence 1 has no text"):
            run(ctx, "encode", t5.text()[:13])
            run(ctx, "decode", [(5, 0, 0), (5, 0, 1)])
        run(ctx, "decode", [(5, 0, 0)])
        with pytest.raises(ggraph.BatchError, match="n_batch"):
            run(ctx, "encode", [(5, p, 0) for p in range(t5.N_CTX + 1)])
        with pytest.raises(ggraph.Error, match="encode"):
            ctx.state_save(tmp_path / "state")
        with pytest.raises(ggraph.Error, match="ggraph-run"):
            Engine(ctx, model.vocab)
    with pytest.raises(ggraph.ModelError, match="no encoder"):
        ggraph.Context(ggraph.Model(spec.write(spec.specs()["llama-dense-b"], tmp_path / "m.gguf")), encoder=True)


def test_an_answer_begins_with_the_files_own_token(models: dict[str, ggraph.Model]) -> None:
    text = [t for t, _, _ in t5.text()[:13]]
    with ggraph.LLM(models["t5"], n_ctx=t5.N_CTX) as llm:
        first, other, again = (llm.generate(prompt, max_tokens=6, temperature=0) for prompt in (text, text[:5], text))
        for answer in (first, other, again):            # nothing is done before
            answer.read()
    assert first.prompt == [3] and first.tokens == again.tokens != other.tokens and len(first.tokens) == 6
    assert first.timings.prompt_n == 14
    with ggraph.Context(models["t5"], n_ctx=t5.N_CTX) as ctx:
        run(ctx, "encode", [(t, p, 0) for p, t in enumerate(text)])
        tokens = [3]
        for _ in range(6):
            tokens.append(int(run(ctx, "decode", [(tokens[-1], 0, 0)])[-1].argmax()))
    assert tokens[1:] == first.tokens
