"""Ctrl-C and `abort` anywhere in a step: memory says what is done, what comes next is as if nothing had been, and nobody else is
stopped. And models that several threads open at once."""
from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggraph import Aborted, Batch, Context, Error, Model
from ggraph.backends.cpu import pool
from ggraph.memory.cache import Group, KVCache
from ggraph.schedule.plan import Plan
from tests import spec
from tests.interrupts import interrupted

N_SEQ, PROMPT = 2, 6
OPTIONS: dict[str, Any] = {"n_ctx": 512, "n_seq_max": N_SEQ, "n_ubatch": 4, "n_threads": 1, "n_threads_batch": 1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Model]]:
    folder = tmp_path_factory.mktemp("models")
    names = "llama-dense", "falcon-h1-dense"
    opened = {n: Model(spec.write(spec.specs()[n], folder / f"{n}.gguf"), backend="cpu") for n in names}
    yield opened
    for model in opened.values():
        model.close()


def feed(ctx: Context, rows: list[tuple[int, int]]) -> np.ndarray:
    """Decode (token, sequence) rows; all logits."""
    batch = Batch()
    for token, seq in rows:
        batch.add(token, None, seq, output=True)
    ctx.process("decode", batch)
    return np.array(ctx.logits)


def begin(ctx: Context) -> None:
    """Both sequences hold the same few tokens."""
    for seq in range(N_SEQ):
        ctx.memory.seq_rm(seq)
    feed(ctx, [(3 * i + seq, seq) for i in range(PROMPT) for seq in range(N_SEQ)])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")         # where it hits a generator that ends
@pytest.mark.parametrize("name,options", [("llama-dense", {"kv_unified": False}), ("falcon-h1-dense", {"n_rollback": 2})])
def test_ctrl_c_anywhere_in_a_step(models: dict[str, Model], name: str, options: dict[str, Any]) -> None:
    """At random lines: all stores agree on what is done, and the rest of the batch gives what it always gives."""
    rows = [(40 + i, i % N_SEQ) for i in range(10)]

    def finish(ctx: Context) -> np.ndarray:
        done = [ctx.memory.seq_pos_max(s) + 1 - PROMPT for s in range(N_SEQ)]
        for seq in range(N_SEQ):
            for token in [t for t, s in rows if s == seq][done[seq]:]:
                feed(ctx, [(token, seq)])
        return feed(ctx, [(7, 0), (8, 1)])

    with Context(models[name], **OPTIONS | options) as ctx:
        begin(ctx)
        want = finish(ctx)
        begin(ctx)
        total = interrupted(lambda: feed(ctx, rows), -1)
        for k in random.Random(0).choices(range(1, total), k=30):
            begin(ctx)
            interrupted(lambda: feed(ctx, rows), k)
            for seq in range(N_SEQ):
                assert len({store.seq_pos_max(seq) for store in ctx.memory.stores}) == 1, (k, total)
            np.testing.assert_array_equal(finish(ctx), want, f"after Ctrl-C at event {k} of {total}")


def test_ctrl_c_while_a_step_is_committed(models: dict[str, Model]) -> None:
    """Its tokens are done in all stores, or in none."""
    with Context(models["falcon-h1-dense"], **OPTIONS) as ctx:
        found = []
        for k in range(1, 100):
            begin(ctx)
            step, = ctx.memory.prepare(ctx._validate("decode", batch_of([(5, 0), (6, 1)])))
            ctx.memory.apply(step)
            n = interrupted(ctx.memory.commit, k)
            ctx.memory.rollback()
            last = {store.seq_pos_max(seq) for store in ctx.memory.stores for seq in range(N_SEQ)}
            assert len(last) == 1
            found.append(last.pop() - PROMPT + 1)
            if n < k:
                break
        assert len(found) > 8 and found == sorted(found) and set(found) == {0, 1}


def batch_of(rows: list[tuple[int, int]]) -> Batch:
    batch = Batch()
    for token, seq in rows:
        batch.add(token, None, seq, output=True)
    return batch


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, first: bool = True) -> None:
    """The next call of a method ends with Ctrl-C, before its work or behind it."""
    real = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(owner, name, real)
        if not first:
            real(*args, **kwargs)
        raise KeyboardInterrupt
    monkeypatch.setattr(owner, name, method)


def test_a_rotation_that_is_interrupted_costs_its_sequence_alone(models: dict[str, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows which of its K was rotated, so that it is taken out; what is there of others counts as ever."""
    with Context(models["llama-dense"], **OPTIONS) as ctx:
        begin(ctx)
        want = feed(ctx, [(9, 1)])
        begin(ctx)
        assert ctx.memory.seq_rm(0, 0, 2) and ctx.memory.seq_add(0, 2, -1, -2)
        fail_once(monkeypatch, Plan, "run", first=False)
        with pytest.raises(KeyboardInterrupt):
            feed(ctx, [(9, 1)])
        assert ctx.memory.seq_pos_max(0) == -1 and ctx.memory.seq_pos_max(1) == PROMPT - 1
        np.testing.assert_array_equal(feed(ctx, [(9, 1)]), want)
        fresh = feed(ctx, [(3 * i, 0) for i in range(PROMPT)])
    with Context(models["llama-dense"], **OPTIONS) as ctx:
        np.testing.assert_array_equal(feed(ctx, [(3 * i, 0) for i in range(PROMPT)]), fresh)


def test_a_copy_of_a_stream_that_is_interrupted_is_made_again(models: dict[str, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    with Context(models["llama-dense"], **OPTIONS, kv_unified=False) as ctx:
        begin(ctx)
        want = feed(ctx, [(9, 0)])
        begin(ctx)
        assert ctx.memory.seq_cp(0, 1)
        fail_once(monkeypatch, KVCache, "copy_stream")
        with pytest.raises(KeyboardInterrupt):
            feed(ctx, [(9, 1)])
        np.testing.assert_array_equal(feed(ctx, [(9, 1)]), want)


@pytest.mark.parametrize("seq", [None, 1])
def test_a_state_that_came_in_part_is_taken_out(models: dict[str, Model], monkeypatch: pytest.MonkeyPatch, seq: int | None) -> None:
    with Context(models["falcon-h1-dense"], **OPTIONS) as ctx:
        begin(ctx)
        state = ctx.state_get(seq)
        fail_once(monkeypatch, Group, "write_rows")
        with pytest.raises(KeyboardInterrupt):
            ctx.state_set(state, seq)
        assert [ctx.memory.seq_pos_max(s) for s in range(N_SEQ)] == ([-1, -1] if seq is None else [PROMPT - 1, -1])
        ctx.state_set(state, seq)
        assert ctx.memory.seq_pos_max(1) == PROMPT - 1


def test_a_state_whose_last_part_is_damaged_changes_nothing(models: dict[str, Model]) -> None:
    """Of a hybrid model: K and V are sound, the rows of states are not."""
    with Context(models["falcon-h1-dense"], **OPTIONS) as ctx:
        begin(ctx)
        state = ctx.state_get()
        feed(ctx, [(1, 0), (1, 1)])
        for name, bad in (("1.seq", 7), ("1.seq", -1), ("1.pos", -1), ("1.pos", PROMPT), ("0.pos", 3)):
            with pytest.raises(Error, match="saved state"):
                ctx.state_set(state | {name: np.full_like(state[name], bad)})
            assert {store.seq_pos_max(s) for store in ctx.memory.stores for s in range(N_SEQ)} == {PROMPT}
        for name in state:
            with pytest.raises(Error):
                ctx.state_set(state | {name: np.array(3, state[name].dtype)})


def test_sizes_that_were_taken_over_in_part_count_as_none(models: dict[str, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of one size, then of another, interrupted, then of the first again."""
    with Context(models["llama-dense"], **OPTIONS) as ctx:
        rows = [(1, 0), (2, 0), (3, 0)]
        begin(ctx)
        want = feed(ctx, rows)
        for name in ("_parts", "_visible_sizes"):           # before and behind what the kernels read
            begin(ctx)
            feed(ctx, rows)
            ctx.memory.seq_rm(0, PROMPT, -1)
            plan = ctx._running
            assert plan is not None
            owner: Any = plan.compiled[0].sizes if name == "_parts" else plan._visible_sizes        # type: ignore[attr-defined]
            fail_once(monkeypatch, type(owner), "update", first=False)
            with pytest.raises(KeyboardInterrupt):
                feed(ctx, rows[:1])
            np.testing.assert_array_equal(feed(ctx, rows), want)


@pytest.mark.parametrize("who", ["itself", "another"])
def test_abort_stops_its_own_context_alone(models: dict[str, Model], monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    """Of two over one model."""
    real = pool._Pool.run
    with Context(models["llama-dense"], **OPTIONS) as ctx, Context(models["llama-dense"], **OPTIONS) as other:
        begin(other)
        begin(ctx)
        want = feed(ctx, [(9, 0)])
        begin(ctx)

        def run(*args: Any) -> None:
            (ctx if who == "itself" else other).abort()
            real(*args)
        monkeypatch.setattr(pool._Pool, "run", run)
        if who == "itself":
            with pytest.raises(Aborted):
                feed(ctx, [(9, 0)])
            monkeypatch.setattr(pool._Pool, "run", real)
        np.testing.assert_array_equal(feed(ctx, [(9, 0)]), want)


def test_a_model_that_is_closed_while_a_context_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits, and then the Context is closed as well."""
    model = Model(spec.write(spec.specs()["llama-dense"], tmp_path / "m.gguf"), backend="cpu")
    real, close = Context._open, threading.Thread(target=model.close)

    def opened(ctx: Context) -> str:
        close.start()
        close.join(0.2)
        assert close.is_alive()
        return real(ctx)
    monkeypatch.setattr(Context, "_open", opened)
    ctx = Context(model, **OPTIONS)
    close.join(10)
    assert not close.is_alive() and not ctx.plans.plans
    with pytest.raises(Error, match="this Context is closed"):
        feed(ctx, [(1, 0)])
    with pytest.raises(Error, match="is closed"):
        Context(model, **OPTIONS)


def test_threads_that_open_contexts_of_a_new_model_at_once(tmp_path: Path, models: dict[str, Model]) -> None:
    """Each waits until all weights are packed, whoever packs them."""
    with Context(models["llama-dense"], **OPTIONS) as ctx:
        want = feed(ctx, [(9, 0)])
    path = spec.write(spec.specs()["llama-dense"], tmp_path / "m.gguf")
    for _ in range(3):
        with Model(path, backend="cpu") as model:
            start = threading.Barrier(4)

            def first(_: int, model: Model = model, start: threading.Barrier = start) -> np.ndarray:
                start.wait(10)
                with Context(model, **OPTIONS) as ctx:
                    return feed(ctx, [(9, 0)])
            with ThreadPoolExecutor(4) as threads:
                found = list(threads.map(first, range(4)))
            for logits in found:
                np.testing.assert_array_equal(logits, want)
