"""Chunks that are moved in the cache: what is planned, what memory and tokens hold afterwards, and where it is refused."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggraph
from ggraph.generate import History
from ggraph.serve.chunks import Chunk, move, plan, refusal
from tests import spec, tiny
from tests.serve.test_engine import Asked, idle
from tests.serve.test_shelf import ask, engine, read

A, B, C, D = (list(range(i, i + 20)) for i in (0, 20, 40, 60))


@pytest.mark.parametrize("have, want, start, least, chunks", [
    (A + B + C, A + C, 20, 5, [Chunk(40, 20, 20)]),
    (A + B + C + D, A + C + D, 20, 5, [Chunk(40, 20, 40)]),
    (A + B + C + B + D, A + C + D, 20, 5, [Chunk(40, 20, 20), Chunk(80, 40, 20)]),
    (A + B + C[:4], A + C, 20, 5, []),
    (A + B + C[:5], A + C, 20, 5, [Chunk(40, 20, 5)]),
    (B + A, A, 0, 20, [Chunk(20, 0, 20)]),
    (A + C, A + B + C, 20, 5, []),                  # nothing is put in between, as in llama.cpp
    (A, A, 20, 5, []),
    ([], A, 0, 1, []),
])
def test_plan(have: list[int], want: list[int], start: int, least: int, chunks: list[Chunk]) -> None:
    assert plan(have, want, start, least) == chunks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ggraph.Model]:
    with ggraph.Model(tiny.write(tmp_path_factory.mktemp("chunks") / "tiny.gguf")) as model:
        yield model


def test_moved_tokens_are_where_they_would_be(model: ggraph.Model) -> None:
    """With one layer less to mix them, K and V of a token depend on it alone: moved ones are as if evaluated there."""
    with ggraph.Context(model, n_ctx=256, n_threads=1, type_k="f32", type_v="f32") as ctx:
        history = History(ctx)
        history.add(A + B + C)
        assert move(history, plan(history.tokens, A + C, 20, 5)) == 20
        assert history.tokens == A + C and ctx.memory.seq_pos_max(0) == 39
        moved = ctx.state_get(0)
        history.clear()
        history.add(A + C)
        fresh = ctx.state_get(0)
    keys = [k for k in fresh if "cache_k_l0" in k]
    assert keys
    for key in keys:
        assert np.allclose(moved[key].view(np.float32), fresh[key].view(np.float32), atol=1e-5)


def served(model: ggraph.Model, reuse: int, **options: Any) -> Iterator[ggraph.Engine]:
    with ggraph.Context(model, n_ctx=512, n_seq_max=2, n_ubatch=32, n_threads=1) as ctx:
        e = ggraph.Engine(ctx, model.vocab, cache_reuse=reuse, **options)
        yield e
        e.close()


def test_a_request_reuses_chunks(model: ggraph.Model) -> None:
    head, middle, tail = "the rain in " * 3, "and a cat on a mat " * 3, "wind and snow in the air " * 3
    for e in served(model, 8):
        Asked(e, model, head + middle + tail, slot=0).read()
        text, (done,) = Asked(e, model, head + tail, slot=0, max_tokens=20).read()
        n, n_head = len(model.vocab.encode(head + tail)), len(model.vocab.encode(head))
        assert done.n_cached > n_head + 20 and done.n_evaluated == n - done.n_cached and idle(e)
        assert "of them moved" in e.slots[0].reuse and len(text[0]) > 0
        _, (done,) = Asked(e, model, head + middle + tail, slot=0, cache_reuse=0).read()
        assert done.n_cached < n_head + 20 and "moved" not in e.slots[0].reuse
    for e in served(model, 0):
        Asked(e, model, head + middle + tail, slot=0).read()
        _, (done,) = Asked(e, model, head + tail, slot=0, cache_reuse=8).read()
        assert done.n_cached > n_head + 20


def test_cells_that_another_slot_shares_stay_where_they_are(model: ggraph.Model) -> None:
    whole = "the rain in " * 3 + "and a cat on a mat " * 3 + "wind and snow in the air " * 3
    for e in served(model, 8):
        Asked(e, model, whole, slot=0).read()
        want, _ = Asked(e, model, whole, slot=1, max_tokens=20).read()
        assert "shared with slot 0" in e.slots[1].reuse
        Asked(e, model, "the rain in " * 3 + "wind and snow in the air " * 3, slot=0).read()
        assert "are shared" in e.slots[0].reuse and idle(e)
        assert Asked(e, model, whole, slot=1, max_tokens=20).read()[0] == want


@pytest.mark.parametrize("name, why", [("qwen35-dense", "recurrent"), ("mamba2-dense", "recurrent"), ("gpt2-dense", "positions"),
                                       ("llama-dense", ""), ("gemma3-dense", "")])
def test_refusals(name: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with engine(spec.write(spec.specs()[name], tmp_path / "m.gguf"), cache_reuse=4) as e:
        assert why in refusal(e.ctx) and bool(why) == bool(refusal(e.ctx))
        assert ("cannot be reused" in capsys.readouterr().err) == bool(why)
        read(ask(e, A + B + C, slot=0)[1])
        tokens, done = read(ask(e, A + C, slot=0)[1])
        assert len(tokens) == 8
        if why:
            assert done.n_cached in (0, 20) and why in e.slots[0].reuse
