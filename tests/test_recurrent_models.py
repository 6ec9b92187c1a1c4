"""Models with recurrent layers live through anything that can happen to sequences: the next tokens are always those that a fresh
context gives for the same text, to the bit."""
from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ggraph
from tests import spec
from tests.examples import examples
from tests.test_context import context, feed, same

NAMES = ("qwen35-dense-b", "qwen35moe-moe", "qwen3next-moe", "mamba-dense", "mamba2-dense-b", "jamba-dense", "falcon-h1-dense",
         "granitehybrid-dense-b", "nemotron_h_moe-dense", "lfm2-dense", "kimi-linear-moe", "bailingmoe3-moe", "plamo2-dense",
         "minimax-01-moe", "qwen4exp-moe")
NO_SNAPSHOTS = ("minimax-01-moe",)
N_SEQ, BACK = 3, 3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ggraph.Model]]:
    folder = tmp_path_factory.mktemp("models")
    opened = {n: ggraph.Model(spec.write(spec.specs()[n], folder / f"{n}.gguf")) for n in NAMES}
    yield opened
    for model in opened.values():
        model.close()


class Life:
    """A context, and the text that each of its sequences should hold. Every method does one thing that it draws."""

    def __init__(self, ctx: ggraph.Context, data: st.DataObject):
        self.ctx, self.data = ctx, data
        self.texts: list[list[int]] = [[] for _ in range(N_SEQ)]

    def seq(self) -> int:
        return self.data.draw(st.integers(0, N_SEQ - 1), "sequence")

    def decode(self) -> None:
        """Some tokens of some sequences, their rows mixed."""
        news = [self.data.draw(st.lists(st.integers(0, 127), max_size=14), f"tokens of {s}") for s in range(N_SEQ)]
        order = self.data.draw(st.permutations([s for s, new in enumerate(news) for _ in new]), "rows")
        left = [iter(new) for new in news]
        if order:
            feed(self.ctx, [(next(left[s]), s) for s in order])
        self.texts = [text + new for text, new in zip(self.texts, news)]

    def take_back(self) -> None:
        """The last tokens, if the state of before is still known."""
        seq, n = self.seq(), self.data.draw(st.integers(1, BACK + 1), "tokens")
        keep = max(len(self.texts[seq]) - n, 0)
        if self.ctx.memory.seq_rm(seq, keep, -1):
            del self.texts[seq][keep:]

    def release(self) -> None:
        seq = self.seq()
        assert self.ctx.memory.seq_rm(seq)
        self.texts[seq] = []

    def branch(self) -> None:
        src, dst = self.seq(), self.seq()
        if src != dst:
            assert self.ctx.memory.seq_rm(dst) and self.ctx.memory.seq_cp(src, dst)
            self.texts[dst] = list(self.texts[src])

    def save_and_load(self) -> None:
        src, dst = self.seq(), self.seq()
        self.ctx.state_set(self.ctx.state_get(src), dst)
        self.texts[dst] = list(self.texts[src])

    def check(self, fresh: Any) -> None:
        assert [self.ctx.memory.seq_pos_max(s) for s in range(N_SEQ)] == [len(text) - 1 for text in self.texts]
        rows = [(7 + s, s) for s in range(N_SEQ) for _ in range(2)]
        got = feed(self.ctx, rows).reshape(N_SEQ, 2, -1)
        for s, text in enumerate(self.texts):
            assert same(got[s], fresh((*text, 7 + s, 7 + s))), f"sequence {s}"


STEPS = (Life.decode, Life.decode, Life.take_back, Life.release, Life.branch, Life.save_and_load)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(3), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_life(models: dict[str, ggraph.Model], name: str, data: st.DataObject) -> None:
    @cache
    def fresh(text: tuple[int, ...]) -> np.ndarray:
        with context(models[name], n_threads=1) as ctx:
            return feed(ctx, [(t, 0) for t in text])[-2:]
    options = {"n_ubatch": data.draw(st.sampled_from([1, 5, 16, 64]), "n_ubatch"),
               "kv_unified": data.draw(st.booleans(), "unified"),
               "n_rollback": 0 if name in NO_SNAPSHOTS else data.draw(st.sampled_from([0, 1, BACK]), "n_rollback")}
    with context(models[name], n_seq_max=N_SEQ, n_ctx=768, **options) as ctx:
        life = Life(ctx, data)
        life.decode()
        for step in data.draw(st.lists(st.sampled_from(STEPS), min_size=2, max_size=8), "steps"):
            step(life)
        life.check(fresh)


@pytest.mark.parametrize("keep", [0, 7, 19, 20])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_refused_changes_nothing(models: dict[str, ggraph.Model], tmp_path: Path, name: str, keep: int) -> None:
    """Without snapshots nothing but a whole sequence can be taken out."""
    text = [int(t) for t in np.random.RandomState(5).randint(0, 128, 20)]
    with context(models[name]) as ctx:
        feed(ctx, [(t, 0) for t in text])
        assert ctx.memory.seq_rm(0, keep, -1) == (keep in (0, 20))
        left = text if keep else []
        assert ctx.memory.seq_pos_max(0) == len(left) - 1
        got = feed(ctx, [(t, 0) for t in (9, 9)])
    with context(models[name]) as ctx:
        assert same(got, feed(ctx, [(t, 0) for t in (*left, 9, 9)])[-2:])
