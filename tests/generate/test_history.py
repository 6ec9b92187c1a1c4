"""A sequence's tokens and its memory say the same, whatever is kept, refused, moved or interrupted."""
from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ggraph.context import Context
from ggraph.errors import BatchError, ContextFull
from ggraph.generate import LLM, History
from ggraph.model import Model
from tests import spec
from tests.interrupts import interrupted

TOKENS = [1, *random.Random(0).choices(range(5, 280), k=120)]


def close(got: np.ndarray, want: np.ndarray) -> None:
    """NumPy's matrix product rounds by the shape of its operands."""
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def agree(history: History) -> bool:
    return all(s.seq_pos_max(history.seq) == len(history.tokens) - 1 for s in history.ctx.memory.stores)


def logits(history: History, tokens: list[int]) -> np.ndarray:
    history.add(tokens[history.reuse(tokens):])
    assert history.tokens == tokens
    assert agree(history)
    return np.array(history.ctx.logits[-1])


def fresh(model: Model, tokens: list[int], **options: Any) -> np.ndarray:
    with Context(model, **{"n_ctx": 256, "n_ubatch": 16, **options}) as ctx:
        return logits(History(ctx), tokens)


@pytest.fixture
def history(llm: LLM) -> History:
    return History(llm.ctx)


@pytest.mark.parametrize("same", [0, 1, 15, 16, 17, 39, 40])
def test_the_common_start_is_kept(model: Model, history: History, same: int) -> None:
    history.add(TOKENS[:40])
    other = TOKENS[:same] + TOKENS[60:80]
    assert history.reuse(other) == same
    history.add(other[same:])
    close(history.ctx.logits[-1], fresh(model, other))


def test_the_last_token_is_evaluated_again(model: Model, history: History) -> None:
    want = logits(history, TOKENS[:20])
    assert history.reuse(TOKENS[:20]) == 19
    history.add(TOKENS[19:20])
    close(history.ctx.logits[-1], want)
    assert history.reuse(TOKENS[:10]) == 9


def test_memory_that_cannot_go_back_begins_anew(model: Model, history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a window or a state does: only the whole sequence can be removed."""
    history.add(TOKENS[:40])
    remove = history.ctx.memory.seq_rm
    monkeypatch.setattr(history.ctx.memory, "seq_rm", lambda seq, p0, p1: p0 < 1 and remove(seq, p0, p1))
    assert history.reuse(TOKENS[:20]) == 0
    assert history.tokens == [] and agree(history)
    close(logits(history, TOKENS[:20]), fresh(model, TOKENS[:20]))
    assert history.reuse([*TOKENS[:20], 7]) == 20       # nothing has to go


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A model with layers whose window is much smaller than the texts."""
    name = next(name for name, s in sorted(spec.specs().items()) if s["arch"] == "gemma2")
    path = spec.write(spec.specs()[name], tmp_path_factory.mktemp("swa") / "swa.gguf")
    with Model(path, kv_overrides={"gemma2.attention.sliding_window": 8}) as model:
        yield model


@pytest.mark.parametrize(("length", "kept", "reused"), [(300, 290, 290), (300, 30, 0)])
def test_a_window_answers_as_if_it_were_new(windowed: Model, length: int, kept: int, reused: int) -> None:
    """Its 256 cells have given away what is far behind: then everything is evaluated again."""
    assert windowed.hparams.n_swa == 8
    tokens = random.Random(1).choices(range(windowed.n_vocab), k=310)
    other = tokens[:kept] + tokens[300:310]
    with Context(windowed, n_ctx=512, n_ubatch=64) as ctx:
        history = History(ctx)
        logits(history, tokens[:length])
        assert history.reuse(other) == reused
        close(logits(history, other), fresh(windowed, other, n_ctx=512, n_ubatch=64))


def test_a_refused_batch_leaves_no_token(history: History) -> None:
    history.add(TOKENS[:20])
    with pytest.raises(BatchError):
        history.add([5, 6, 10**6])
    assert history.tokens == TOKENS[:20] and agree(history)
    with pytest.raises(ContextFull):
        history.add(TOKENS * 3)
    assert history.tokens[:20] == TOKENS[:20] and agree(history)


def test_shift(model: Model, history: History) -> None:
    history.add(TOKENS[:50])
    history.shift(6)
    assert history.tokens == TOKENS[:6] + TOKENS[28:50]
    history.add([9])
    assert agree(history)


def test_shift_where_positions_cannot_be_moved(model: Model, history: History, monkeypatch: pytest.MonkeyPatch,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    history.add(TOKENS[:50])
    monkeypatch.setattr(history.ctx.memory, "seq_add", lambda *_: False)
    history.shift(6)
    assert "evaluated again" in capsys.readouterr().err
    close(logits(history, [*history.tokens, 9]), fresh(model, [*TOKENS[:6], *TOKENS[28:50], 9]))


def test_two_sequences_in_one_batch(model: Model) -> None:
    from ggraph.batch import Batch
    with Context(model, n_ctx=512, n_ubatch=16, n_seq_max=2) as ctx:
        a, b = History(ctx, 0), History(ctx, 1)
        batch = Batch()
        a.queue(batch, TOKENS[:20])
        b.queue(batch, TOKENS[50:65])
        ctx.process("decode", batch)
        close(ctx.logits[0], fresh(model, TOKENS[:20]))
        close(ctx.logits[1], fresh(model, TOKENS[50:65]))
        assert a.reuse(TOKENS[:10]) == 9 and agree(a) and agree(b)


def test_ctrl_c_anywhere_leaves_a_usable_history(llm: LLM) -> None:
    """At random lines. A thousand times as many points were tried by hand, without a failure."""
    prompts = ["the rain in an", "the rain on a hill is in the air"]

    def text() -> list[str]:
        return [llm.generate(p, max_tokens=3, temperature=0.0).read() for p in prompts]

    want = text()
    total = interrupted(text, k=-1)
    for k in random.Random(0).choices(range(1, total), k=25):
        interrupted(text, k)
        assert text() == want, f"after Ctrl-C at event {k} of {total}"
