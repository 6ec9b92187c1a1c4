"""Gemma 3n and Gemma 4: layers that read what earlier ones keep, in all that can happen to a cache; embeddings that are given."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggraph
from ggraph.errors import ModelError
from tests import spec
from tests.test_architectures import nmse
from tests.test_context import alone, context, feed, ids, same

SPECS = {c["name"]: c["spec"] for c in spec.shapes()}
N_KEPT = {"gemma4": (5, 3), "gemma3n": (25, 20)}           # layers, and how many of them have a cache


@pytest.fixture(scope="module", params=N_KEPT)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ggraph.Model]:
    path: Path = tmp_path_factory.mktemp("m") / "m.gguf"
    with ggraph.Model(spec.write(SPECS[request.param], path)) as model:
        yield model


def test_layers_share_k_and_v(model: ggraph.Model) -> None:
    hp, (n, kept) = model.hparams, N_KEPT[model.hparams.arch]
    assert hp.n_layer == n and [il for il in range(n) if hp.has_kv(il)] == list(range(kept))
    assert all(hp.is_swa(hp.kv_layer(il)) == hp.is_swa(il) and hp.kv_layer(il) < kept for il in range(n))
    with context(model) as ctx:
        assert sorted(t.name for t in ctx.memory.tensors()) == sorted(f"cache_{x}_l{il}" for il in range(kept) for x in "kv")


@pytest.mark.parametrize("unified", [True, False])
def test_a_sequence_alone_equals_the_same_beside_others(model: ggraph.Model, unified: bool) -> None:
    lengths = (30, 11, 23)
    with context(model, n_seq_max=3, n_ubatch=7, kv_unified=unified, n_ctx=768) as ctx:
        rows = [(t, s) for s, n in enumerate(lengths) for t in ids(s, n)]
        got = feed(ctx, rows)
    for s, n in enumerate(lengths):
        assert same(got[[i for i, (_, r) in enumerate(rows) if r == s]], alone(model, s, n))


def test_removed_saved_and_loaded(model: ggraph.Model, tmp_path: Path) -> None:
    with context(model, n_seq_max=2) as ctx:
        feed(ctx, [(t, 0) for t in ids(0, 36)])
        assert ctx.memory.seq_rm(0, 33, -1)
        ctx.state_save(tmp_path / "state", seq=0)
        assert ctx.memory.seq_rm(0)
        ctx.state_load(tmp_path / "state", seq=1)
        assert same(feed(ctx, [(t, 1) for t in ids(0, 40)[33:]]), alone(model, 0, 40)[33:])


def test_moved_positions(model: ggraph.Model) -> None:
    """With F32 caches moving a whole text changes nothing."""
    options: dict[str, Any] = {"type_k": "f32", "type_v": "f32"}
    with context(model, **options) as ctx:
        batch = ggraph.Batch()
        for i, t in enumerate(ids(0, 20)):
            batch.add(t, i + 9, 0)
        ctx.process("decode", batch)
        assert ctx.memory.seq_add(0, 0, -1, -9)
        got = feed(ctx, [(t, 0) for t in ids(0, 24)[20:]])
    assert nmse(got, alone(model, 0, 24, **options)[20:]) <= 1e-6


def test_given_embeddings_have_the_first_tokens_own_ones(model: ggraph.Model) -> None:
    """As in llama.cpp."""
    n = model.hparams.n_embd
    row = spec.weights("token_embd.weight", [n, 128])[0] * np.float32(n) ** np.float32(0.5)
    with context(model) as ctx:
        batch = ggraph.Batch()
        batch.add_embd(row, None, 0, output=True)
        batch.add_embd(row, None, 0, output=True)
        ctx.process("decode", batch)
        got = ctx.logits.copy()
    with context(model) as ctx:
        assert nmse(got, feed(ctx, [(0, 0), (0, 0)])) <= 1e-9


def test_a_count_of_shared_layers_that_cannot_be(tmp_path: Path) -> None:
    path = spec.write(SPECS["gemma4"], tmp_path / "m.gguf")
    for n, said in ((5, "shared_kv_layers is 5 of 5 layers"), (4, "shares K and V of an earlier layer, and none is of its kind")):
        with pytest.raises(ModelError, match=said):
            ggraph.Model(path, kv_overrides={"gemma4.attention.shared_kv_layers": n})
