"""Attention in models without a cache: tokens see their own batch, of their own sequence, and nothing is remembered."""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import ggraph
from tests import spec


@pytest.fixture(scope="module")
def llada(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ggraph.Model]:
    path = spec.write(spec.specs()["llada-dense"], tmp_path_factory.mktemp("llada") / "m.gguf")
    with ggraph.Model(path) as model:
        yield model


def run(model: ggraph.Model, *sequences: list[int], flash_attn: str = "off", n_ubatch: int = 64,
        unified: bool = True) -> list[np.ndarray]:
    """Logits of each sequence, all in one batch, their tokens in turn."""
    batch = ggraph.Batch()
    rows: list[list[int]] = [[] for _ in sequences]
    for i in range(max(map(len, sequences))):
        for s, tokens in enumerate(sequences):
            if i < len(tokens):
                rows[s].append(len(batch))
                batch.add(tokens[i], i, s, output=True)
    with ggraph.Context(model, n_ctx=256, n_ubatch=n_ubatch, n_seq_max=len(sequences), kv_unified=unified,
                        flash_attn=flash_attn) as ctx:
        ctx.process("encode", batch)
        assert ctx.memory.seq_pos_max(0) == -1
        return [ctx.logits[r].copy() for r in rows]


FIRST, SECOND = spec.tokens()[:20], spec.tokens()[20:33]


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("flash_attn", ["off", "on"])
def test_sequences_of_a_batch_do_not_see_each_other(llada: ggraph.Model, flash_attn: str, unified: bool) -> None:
    both = run(llada, FIRST, SECOND, flash_attn=flash_attn, unified=unified)
    for got, tokens in zip(both, (FIRST, SECOND)):
        np.testing.assert_allclose(got, run(llada, tokens)[0], rtol=0, atol=2e-3)


def test_tokens_see_what_follows_them(llada: ggraph.Model) -> None:
    short, long = run(llada, FIRST[:10])[0], run(llada, FIRST)[0]
    assert np.abs(short - long[:10]).max() > 0.1


def test_a_batch_runs_whole_whatever_n_ubatch_is(llada: ggraph.Model) -> None:
    np.testing.assert_array_equal(run(llada, FIRST, n_ubatch=4)[0], run(llada, FIRST)[0])
