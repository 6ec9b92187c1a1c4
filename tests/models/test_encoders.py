"""Encoders against llama.cpp: embeddings of tiny random models in every pooling, and of a real BERT."""
from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import ggraph
from ggraph import env
from ggraph.batch import Ubatch
from ggraph.errors import BatchError, Error
from ggraph.inputs import Distances
from ggraph.memory import Step
from tests import encoders, spec
from tests.test_architectures import nmse

GOLDEN = np.load(spec.FOLDER / "encoders.npz")


def embed(path: Path, pooling: str | None, rows: list[tuple[int, int, int]], n_seq: int,
          flash_attn: str = "off") -> npt.NDArray[np.float32]:
    with ggraph.Model(path) as model, ggraph.Context(model, n_ctx=256, n_batch=64, n_seq_max=n_seq, embeddings=True,
                                                     pooling=pooling, n_threads=2, flash_attn=flash_attn) as ctx:
        batch = ggraph.Batch()
        for token, pos, seq in rows:
            batch.add(token, pos, seq, output=True)
        ctx.process("encode", batch)
        return np.array(ctx.embeddings)


@pytest.mark.parametrize("flash_attn", ["off", "on"])
@pytest.mark.parametrize(("name", "pooling"), encoders.cases())
def test_golden(name: str, pooling: str, flash_attn: str, tmp_path: Path) -> None:
    path = spec.write(encoders.SPECS[name], tmp_path / "m.gguf")
    got = embed(path, pooling, encoders.batch(), len(encoders.LENGTHS), flash_attn=flash_attn)
    want = GOLDEN[f"{name}/{pooling}"]
    assert got.shape == want.shape
    assert nmse(got, want) <= 1e-5


def test_vectors_do_not_depend_on_company(tmp_path: Path) -> None:
    path = spec.write(encoders.SPECS["modern-bert"], tmp_path / "m.gguf")
    rows = encoders.batch()
    both = embed(path, "mean", rows, len(encoders.LENGTHS))
    second = [(token, pos, 0) for token, pos, seq in rows if seq == 1]
    np.testing.assert_allclose(embed(path, "mean", second, 1)[0], both[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("n_buckets", [8, 32, 64])
def test_buckets_of_distances(n_buckets: int) -> None:
    """Exact to a quarter of the buckets, then growing; from 128 on all are one; a half for what follows."""
    pos = np.array([0, 1, 2, 7, 8, 15, 16, 40, 90, 127, 128, 200], np.int32)
    n = len(pos)
    ubatch = Ubatch(pos, None, pos[None], np.zeros(n, np.int32), ((0,),) * n, np.ones(n, bool), pos, 1, n, n)
    bucket = Distances(n, n_buckets).fill(Step(ubatch, ()))[0]

    def expected(distance: int) -> int:
        half, n = n_buckets // 2, abs(distance)
        exact = half // 2
        grown = n if n < exact else min(half - 1, math.floor(exact + math.log(n / exact) / math.log(128 / exact) * (half - exact)))
        return grown + half * (distance > 0)
    assert bucket.tolist() == [[expected(int(seen - by)) for seen in pos] for by in pos]


def test_positions_beyond_the_table_are_refused(tmp_path: Path) -> None:
    path = spec.write(encoders.SPECS["bert"], tmp_path / "m.gguf")
    with pytest.raises(BatchError, match="position 64; this model has learned positions 0 to 63"):
        embed(path, "mean", [(1, 64, 0)], 1)


def test_an_encoder_has_no_logits_and_ranks_only_with_a_classifier(tmp_path: Path) -> None:
    path = spec.write(encoders.SPECS["bert"], tmp_path / "m.gguf")
    with ggraph.Model(path) as model, ggraph.Context(model) as ctx:
        batch = ggraph.Batch()
        batch.add(1, 0, 0, output=True)
        ctx.process("encode", batch)
        assert ctx.embeddings.shape == (1, encoders.N_EMBD)
        with pytest.raises(Error, match="gives embeddings"):
            _ = ctx.logits
    with pytest.raises(Error, match="no classifier"):
        embed(spec.write(encoders.SPECS["bert-b"], tmp_path / "b.gguf"), "rank", [(1, 0, 0)], 1)


@pytest.fixture(scope="module")
def minilm() -> Path:
    """all-MiniLM-L6-v2 Q8_0, 25 MB, which is not committed."""
    path = Path(env.get("GGRAPH_GOLDENS") or ".") / "../models/all-minilm-l6-v2-q8_0.gguf"
    if not path.is_file():
        pytest.skip("needs all-minilm-l6-v2-q8_0.gguf beside the folder that GGRAPH_GOLDENS names")
    return path


def test_a_real_bert_through_llm(minilm: Path) -> None:
    golden = np.load(spec.FOLDER.parent / "embeddings.npz")
    texts, want = golden["texts"].tolist(), golden["embeddings"]
    with ggraph.LLM(minilm) as llm:
        got = llm.embed(texts)
        raw = llm.embed(texts[:1], normalize=False)
    assert (np.abs(np.linalg.norm(got, axis=1) - 1) < 1e-5).all() and abs(np.linalg.norm(raw) - 1) > 0.01
    assert ((got * want).sum(1) > 0.999).all()
