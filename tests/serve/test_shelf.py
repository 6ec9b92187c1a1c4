"""Caches in host memory and checkpoints, on memories of all kinds: what comes back is what was forgotten."""
from __future__ import annotations

import queue
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggraph
from ggraph.serve.prefix import common
from ggraph.serve.shelf import Packed
from tests import spec
from tests.serve.test_engine import paused

MODELS = ["llama-dense", "gemma3-dense", "falcon-h1-dense", "mamba2-dense", "lfm2-dense", "qwen35-dense"]
STIFF = MODELS[1:]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("shelf")
    return {name: spec.write(spec.specs()[name], folder / f"{name}.gguf") for name in MODELS}


@contextmanager
def engine(file: Path, cache_bytes: int = 1 << 24, cache_reuse: int = 0, **options: Any) -> Iterator[ggraph.Engine]:
    options = {"n_ctx": 512, "n_seq_max": 4, "n_ubatch": 32, "n_threads": 1, **options}
    with ggraph.Model(file) as model, ggraph.Context(model, **options) as ctx:
        engine = ggraph.Engine(ctx, model.vocab, cache_bytes=cache_bytes, cache_reuse=cache_reuse)
        try:
            yield engine
        finally:
            engine.close()


def ask(engine: ggraph.Engine, prompt: Sequence[int], n: int = 8, **options: Any) -> tuple[ggraph.Request, queue.Queue[Any]]:
    events: queue.Queue[Any] = queue.Queue()
    sampler = ggraph.Sampler("temp 0", engine.ctx.model.n_vocab)
    request = ggraph.Request(prompt, [sampler], events.put, max_tokens=n, **options)
    engine.submit(request)
    return request, events


def read(events: queue.Queue[Any]) -> tuple[list[int], ggraph.Done]:
    tokens: list[int] = []
    while not isinstance(event := events.get(timeout=30), ggraph.Done):
        assert isinstance(event, ggraph.Piece), event
        tokens += event.tokens
    return tokens, event


def prompts(n: int, longest: int = 120) -> list[list[int]]:
    """Random ids, many with a common start."""
    rng = random.Random(11)
    start = [rng.randrange(1, 120) for _ in range(60)]
    return [(start[:rng.randrange(60)] if i % 2 else []) + [rng.randrange(1, 120) for _ in range(rng.randrange(2, longest - 60))]
            for i in range(n)]


@pytest.mark.parametrize("name", MODELS)
def test_isolation(files: dict[str, Path], name: str) -> None:
    """Requests together, half of them cancelled, each prompt twice: every answer is that of a lone request."""
    rng = random.Random(3)
    asked = prompts(24)
    with engine(files[name], cache_bytes=0, n_seq_max=1) as alone:
        want = [read(ask(alone, p, cache_prompt=False)[1])[0] for p in asked]
    with engine(files[name]) as e:
        running = [(i, *ask(e, asked[i])) for i in [*range(24), *range(23, -1, -1)]]
        for _, request, _ in rng.sample(running, 24):
            e.cancel(request)
        for i, request, events in running:
            if not request.cancelled:
                assert read(events)[0] == want[i], (name, i)
        for _ in range(200):
            if e.call(lambda: all(s.task is None for s in e.slots)).result(10):
                break
        last = e.call(lambda: [e.ctx.memory.seq_pos_max(s.id) + 1 for s in e.slots]).result(10)
        assert last == [len(s.tokens) for s in e.slots] and not any(s.task for s in e.slots)


@pytest.mark.parametrize("name", MODELS)
def test_what_was_forgotten_comes_back(files: dict[str, Path], name: str) -> None:
    """One slot, two prompts in turn: the third answer finds the first one's start on the shelf."""
    a, b = ([*range(1, 100)], [*range(110, 10, -1)])
    with engine(files[name], n_seq_max=1, n_ctx=256) as e:
        first, _ = read(ask(e, a)[1])
        read(ask(e, b)[1])
        again, done = read(ask(e, a)[1])
        assert again == first and done.n_cached >= len(a) - 4
        assert "host memory" in e.slots[0].reuse and len(e.shelf) >= 1


@pytest.mark.parametrize("name", STIFF)
def test_a_checkpoint_near_the_end_of_a_prompt(files: dict[str, Path], name: str) -> None:
    """The next turn repeats all of the prompt but its last tokens: what came after them is taken back."""
    prompt = [*range(1, 100)]
    other = [*prompt[:96], 7, 8, 9, 10, 11, 12]
    with engine(files[name], cache_bytes=0, n_seq_max=1) as alone:
        want = read(ask(alone, other)[1])[0]
    with engine(files[name], n_seq_max=1) as e:
        read(ask(e, prompt)[1])
        got, done = read(ask(e, other)[1])
        assert got == want and done.n_cached >= 95


@pytest.mark.parametrize("name", STIFF)
def test_a_prefix_is_evaluated_once_where_memory_cannot_be_cut(files: dict[str, Path], name: str) -> None:
    """Requests that come together: the first one pauses where they part, and the others go on from its state."""
    start = [*range(1, 90)]
    asked = [[*start, i, *range(20 + i, 60)] for i in range(3)]
    with engine(files[name], cache_bytes=0, n_seq_max=1) as alone:
        want = [read(ask(alone, p, cache_prompt=False)[1])[0] for p in asked]
    with engine(files[name], cache_bytes=0) as e:
        with paused(e):
            running = [ask(e, p)[1] for p in asked]
        done = [read(events) for events in running]
        assert [tokens for tokens, _ in done] == want
        assert [d.n_cached for _, d in done] == [0, 89, 89] and "shared with slot" in e.slots[1].reuse


@pytest.mark.parametrize("name", STIFF)
def test_a_checkpoint_where_prompts_part(files: dict[str, Path], name: str) -> None:
    """The second prompt with a known start leaves the state of that start, for the third."""
    start = [*range(1, 80)]
    asked = [[*start, i, *range(20 + i, 60)] for i in range(3)]
    with engine(files[name], cache_bytes=0, n_seq_max=1) as alone:
        want = [read(ask(alone, p, cache_prompt=False)[1])[0] for p in asked]
    with engine(files[name], n_seq_max=1, n_ctx=256) as e:
        done = [read(ask(e, p)[1]) for p in asked]
        assert [tokens for tokens, _ in done] == want
        cached = [d.n_cached for _, d in done]
        if name == "gemma3-dense":          # its window had not given away anything yet
            assert cached == [0, 79, 79]
        else:
            assert cached == [0, 0, 79] and "host memory" in e.slots[0].reuse


def test_preempted_tasks_come_back_from_the_shelf(files: dict[str, Path]) -> None:
    asked = [[i, *range(1, 90)] for i in range(100, 104)]
    with engine(files["llama-dense"], cache_bytes=0, n_seq_max=1) as alone:
        want = [read(ask(alone, p, 100)[1])[0] for p in asked]
    with engine(files["llama-dense"]) as e:
        assert [read(events)[0] for events in [ask(e, p, 100)[1] for p in asked]] == want
        assert e.stats.n_preempted > 0 and sum(len(s.tokens) for s in e.slots) > 0


def test_the_limit_holds(files: dict[str, Path]) -> None:
    with engine(files["llama-dense"], n_seq_max=1, n_ctx=256) as e:
        read(ask(e, [*range(1, 100)])[1])
        size = e.call(lambda: sum(a.nbytes for a in e.ctx.state_get(0).values())).result(10)
    with engine(files["llama-dense"], cache_bytes=5 * size // 2, n_seq_max=1, n_ctx=256) as e:
        for i in range(1, 8):
            read(ask(e, [i, *range(1, 100)])[1])
            assert e.shelf.nbytes <= e.shelf.limit
        assert 1 <= len(e.shelf) <= 2
    with engine(files["llama-dense"], cache_bytes=0, n_seq_max=1, n_ctx=256) as e:
        for i in range(1, 4):
            read(ask(e, [i, *range(1, 100)])[1])
        assert len(e.shelf) == 0


def test_common() -> None:
    rng = random.Random(1)
    for _ in range(300):
        a, b = ([rng.randrange(3) for _ in range(rng.randrange(12))] for _ in range(2))
        n = common(a, b)
        assert a[:n] == b[:n] and (n == min(len(a), len(b)) or a[n] != b[n])


def test_states_are_one_piece_of_memory() -> None:
    """Small pieces of all sizes that come and go leave holes, and a server grows."""
    arrays: dict[str, Any] = {"a": np.arange(7, dtype=np.int32), "b": np.float32(2.5), "c": np.zeros((0, 4), np.float16),
              "d": np.arange(24, dtype=np.uint8).reshape(2, 3, 4)[:, ::2], "e": np.array(["x", "é"])}
    packed = Packed({k: np.asarray(v) for k, v in arrays.items()})
    found = packed.arrays()
    assert list(found) == list(arrays) and all(np.array_equal(found[k], v) for k, v in arrays.items())
    assert all((found[k].dtype == np.asarray(v).dtype and np.shares_memory(found[k], packed.data)) or not found[k].size
               for k, v in arrays.items())
    assert Packed({}).arrays() == {}
