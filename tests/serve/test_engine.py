"""The engine: answers equal those of a lone generation, whatever runs beside them, leaves early or is short of cells."""
from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggraph
from ggraph.serve.prefix import common
from ggraph.serve.slot import MIN_SHARE
from tests import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ggraph.Model]:
    with ggraph.Model(tiny.write(tmp_path_factory.mktemp("engine") / "tiny.gguf")) as model:
        yield model


@pytest.fixture
def engine(model: ggraph.Model) -> Iterator[ggraph.Engine]:
    yield from opened(model)


def opened(model: ggraph.Model, shift: bool = False, guesser: Any = None, n_draft: int = 0,
           **context: Any) -> Iterator[ggraph.Engine]:
    options = {"n_ctx": 256, "n_seq_max": 4, "n_ubatch": 32, "n_threads": 1, **context}
    with ggraph.Context(model, **options) as ctx:
        engine = ggraph.Engine(ctx, model.vocab, context_shift=shift, guesser=guesser, n_draft=n_draft)
        yield engine
        engine.close()


class Asked:
    """A request and its events."""

    def __init__(self, engine: ggraph.Engine, model: ggraph.Model, prompt: str, n: int = 1, chain: str = "temp 0",
                 grammar: ggraph.Grammar | None = None, sampler: ggraph.Sampler | None = None, **options: Any):
        self.events: queue.Queue[Any] = queue.Queue()
        self.n, self.engine = n, engine
        samplers = [ggraph.Sampler(chain if not i else f"temp 1;dist {i}", model.n_vocab, grammar=grammar) for i in range(n)]
        samplers = [sampler] if sampler else samplers
        self.request = ggraph.Request(model.vocab.encode(prompt), samplers, self.events.put, **{"max_tokens": 12, **options})
        engine.submit(self.request)

    def read(self) -> tuple[list[str], list[ggraph.Done]]:
        texts, ends = [""] * self.n, list[ggraph.Done]()
        while len(ends) < self.n:
            event = self.events.get(timeout=30)
            if isinstance(event, ggraph.Failed):
                raise event.error
            if isinstance(event, ggraph.Piece):
                texts[event.index] += event.text
            elif isinstance(event, ggraph.Done):
                ends.append(event)
        return texts, ends

    def text(self) -> str:
        return self.read()[0][0]


def lone(model: ggraph.Model, prompt: str, max_tokens: int = 12) -> str:
    with ggraph.LLM(model, n_ctx=256, n_threads=1) as llm:
        return llm.generate(prompt, max_tokens=max_tokens, temperature=0.0).read()


def idle(engine: ggraph.Engine) -> bool:
    """All slots are free, and tokens and memory agree; asked on the engine's thread."""
    def check() -> bool:
        last = [engine.ctx.memory.seq_pos_max(s.id) + 1 for s in engine.slots]
        return all(s.task is None for s in engine.slots) and last == [len(s.tokens) for s in engine.slots]
    return engine.call(check).result(10)


@contextmanager
def paused(engine: ggraph.Engine) -> Iterator[None]:
    """What is submitted in here comes together."""
    gate = threading.Event()
    engine.call(gate.wait)
    yield
    gate.set()


def test_one(engine: ggraph.Engine, model: ggraph.Model) -> None:
    texts, (done,) = Asked(engine, model, "the rain in").read()
    assert texts[0] == lone(model, "the rain in")
    assert (done.finish_reason, done.stop_type, done.n_generated, done.n_cached) == ("length", "limit", 12, 0)
    assert done.n_prompt == done.n_evaluated == len(model.vocab.encode("the rain in"))
    assert idle(engine)


def test_many_more_than_slots(engine: ggraph.Engine, model: ggraph.Model) -> None:
    prompts = [f"{'rain ' * (i % 5)}on the {c}" for i, c in enumerate("abcdefghijkl")]
    asked = [Asked(engine, model, p) for p in prompts]
    assert [a.text() for a in asked] == [lone(model, p) for p in prompts]
    assert idle(engine)


def test_long_prompts_beside_short_ones(engine: ggraph.Engine, model: ggraph.Model) -> None:
    """Prompts of several chunks do not change those who generate, and are not changed by them."""
    prompts = ["a", "the cat sat on the mat. " * 3, "in", "rain and wind " * 4]
    asked = [Asked(engine, model, p, max_tokens=20) for p in prompts]
    assert [a.text() for a in asked] == [lone(model, p, 20) for p in prompts]


def test_a_long_prompt_costs_others_one_ubatch_a_round(engine: ggraph.Engine, model: ggraph.Model) -> None:
    sizes = []
    process = engine.ctx.process
    engine.ctx.process = lambda kind, batch: (sizes.append(len(batch)), process(kind, batch))  # type: ignore[assignment, func-returns-value, method-assign]
    first = Asked(engine, model, "a", max_tokens=30)
    second = Asked(engine, model, "the rain " * 15)
    first.read(), second.read()
    assert max(sizes) <= engine.ctx.cparams.n_ubatch


def test_a_prefix_is_evaluated_once(engine: ggraph.Engine, model: ggraph.Model) -> None:
    """Requests that come together share the cells of their common start, also while it is being evaluated."""
    start = "you are a cat. " * 5
    shared = [common(model.vocab.encode(start + a), model.vocab.encode(start + b)) for a, b in combinations("abcd", 2)]
    n_start, most = min(shared), max(shared)
    with paused(engine):
        asked = [Asked(engine, model, start + c) for c in "abcd"]
    ends = [a.read() for a in asked]
    assert [texts[0] for texts, _ in ends] == [lone(model, start + c) for c in "abcd"]
    first, *cached = sorted(done[0].n_cached for _, done in ends)
    assert first == 0 and n_start - MIN_SHARE < cached[0] <= cached[-1] <= most
    assert "shared with slot" in engine.slots[1].reuse
    store = engine.ctx.memory.kv[0].store
    assert len(np.unique(np.concatenate([store.line(s.id).cells for s in engine.slots]))) < 2 * most


def test_the_same_again_is_cached(engine: ggraph.Engine, model: ggraph.Model) -> None:
    prompt = "the rain in spain stays "
    a, (first,) = Asked(engine, model, prompt).read()
    b, (second,) = Asked(engine, model, prompt).read()
    c, (third,) = Asked(engine, model, prompt, cache_prompt=False).read()
    assert a == b == c
    assert (second.n_cached, second.n_evaluated, third.n_cached) == (first.n_prompt - 1, 1, 0)


def test_choices(engine: ggraph.Engine, model: ggraph.Model) -> None:
    texts, ends = Asked(engine, model, "the cat", n=3).read()
    assert texts[0] == lone(model, "the cat") and len(set(texts)) == 3
    assert sorted(d.n_evaluated for d in ends) == [0, 0, ends[0].n_prompt]
    assert idle(engine)


def test_choices_of_streams(model: ggraph.Model) -> None:
    """One stream per sequence: the cells are copied."""
    for engine in opened(model, n_ctx=1024, kv_unified=False):
        texts, _ = Asked(engine, model, "the cat", n=3).read()
        assert texts[0] == lone(model, "the cat") and len(set(texts)) == 3


def test_a_certain_slot(engine: ggraph.Engine, model: ggraph.Model) -> None:
    assert [Asked(engine, model, "a", slot=i).read()[1][0].slot for i in (3, 1, 3)] == [3, 1, 3]


def test_stop_string_and_grammar(engine: ggraph.Engine, model: ggraph.Model) -> None:
    full = lone(model, "the", 30)
    word = full[10:13]
    texts, (done,) = Asked(engine, model, "the", max_tokens=30, stop=[word]).read()
    assert texts[0] == full[:full.index(word)] and (done.stop_type, done.stopping_word) == ("word", word)
    pytest.importorskip("llguidance")
    grammar = ggraph.Grammar.gbnf(model.vocab, 'root ::= "rain" | "wind"')
    texts, (done,) = Asked(engine, model, "the", grammar=grammar).read()
    assert texts[0] in ("rain", "wind") and done.stop_type == "eos"


def test_nothing_to_generate(engine: ggraph.Engine, model: ggraph.Model) -> None:
    texts, (done,) = Asked(engine, model, "the", max_tokens=0).read()
    assert texts == [""] and (done.n_generated, done.finish_reason) == (0, "length")


def test_log_probabilities(engine: ggraph.Engine, model: ggraph.Model) -> None:
    asked = Asked(engine, model, "the rain in spain " * 3, logprobs=2, prompt_logprobs=1, max_tokens=3)
    pieces, done = [], None
    while done is None:
        event = asked.events.get(timeout=30)
        pieces += [event] if isinstance(event, ggraph.Piece) else []
        done = event if isinstance(event, ggraph.Done) else None
    with ggraph.LLM(model, n_ctx=256, n_threads=1) as llm:
        scores = llm.score("the rain in spain " * 3)
    assert [(t.token, t.logprob) for t in done.prompt_logprobs] == [(t.token, t.logprob) for t in scores]
    made = [t for p in pieces for t in p.logprobs]
    assert len(made) == 3 and all(t.top[0][1] == pytest.approx(t.logprob) for t in made)


def test_progress(engine: ggraph.Engine, model: ggraph.Model) -> None:
    asked = Asked(engine, model, "the rain " * 12, progress=True, max_tokens=1)
    asked.read()
    assert asked.events.empty()
    asked = Asked(engine, model, "wind the rain " * 8, progress=True, max_tokens=1)
    seen = []
    while not isinstance(event := asked.events.get(timeout=30), ggraph.Done):
        seen += [(event.processed, event.total)] if isinstance(event, ggraph.Progress) else []
    n = len(asked.request.prompt)
    assert seen[0][0] < n and seen[-1] == (n, n) and len(seen) >= 3


# --- what ends early, fails or does not fit


@pytest.mark.parametrize("when", ["at once", "prompt", "generating", "waiting"])
def test_cancelled(engine: ggraph.Engine, model: ggraph.Model, when: str) -> None:
    running = [Asked(engine, model, "a", max_tokens=100) for _ in range(4)] if when == "waiting" else []
    asked = Asked(engine, model, "the rain " * 20, max_tokens=60, progress=True)
    if when == "prompt":
        asked.events.get(timeout=30)
    while when == "generating" and not isinstance(asked.events.get(timeout=30), ggraph.Piece):
        pass
    engine.cancel(asked.request)
    for other in running:
        engine.cancel(other.request)
    deadline = time.monotonic() + 10
    while not idle(engine):
        assert time.monotonic() < deadline
    assert engine.n_waiting == 0
    assert Asked(engine, model, "the cat").text() == lone(model, "the cat")


def test_random_cancels_leave_the_others_alone(engine: ggraph.Engine, model: ggraph.Model) -> None:
    rng = random.Random(7)
    prompts = ["".join(rng.choice("etaoin shr") for _ in range(rng.randrange(2, 60))) for _ in range(40)]
    want = {p: lone(model, p) for p in prompts}
    got: dict[str, str] = {}

    def client(mine: list[str]) -> None:
        for p in mine:
            asked = Asked(engine, model, p)
            if rng.random() < 0.5:
                time.sleep(rng.random() * 0.03)
                engine.cancel(asked.request)
            else:
                got[p] = asked.text()
    threads = [threading.Thread(target=client, args=(prompts[i::8],)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == {p: want[p] for p in got} and len(got) > 8
    assert idle(engine) and engine.n_waiting == 0


def test_a_short_pool_preempts_and_goes_on(engine: ggraph.Engine, model: ggraph.Model) -> None:
    """Four texts that together need more cells than there are: all are finished, and as if alone."""
    prompts = [c * 40 for c in "aeio"]
    asked = [Asked(engine, model, p, max_tokens=60) for p in prompts]
    assert [a.text() for a in asked] == [lone(model, p, 60) for p in prompts]
    assert engine.stats.n_preempted > 0 and idle(engine)


def test_idle_data_goes_first(engine: ggraph.Engine, model: ggraph.Model) -> None:
    for c in "aei":
        Asked(engine, model, c * 60, max_tokens=20).read()
    assert Asked(engine, model, "o" * 100, max_tokens=40).text() == lone(model, "o" * 100, 40)
    assert engine.stats.n_preempted == 0


def test_a_full_context_ends_or_shifts(engine: ggraph.Engine, model: ggraph.Model) -> None:
    prompt = "the rain " * 10
    _, (done,) = Asked(engine, model, prompt, max_tokens=-1).read()
    assert done.stop_type in ("context", "eos") and done.truncated == (done.stop_type == "context")
    for shifting in opened(model, shift=True):
        left = []
        for n_discard in (0, 1, 100, 10**6):
            chain = "logit_bias 2 -inf;temp 0"
            _, (done,) = Asked(shifting, model, prompt, max_tokens=300, chain=chain, n_discard=n_discard).read()
            assert done.n_generated == 300 and done.truncated and idle(shifting)
            left.append(done.n_past)
        assert left[1] == max(left) == shifting.n_ctx - 1 and len(set(left)) > 2


def test_time_limit(engine: ggraph.Engine, model: ggraph.Model) -> None:
    """The text ends with the line in which the time is over."""
    newline = tiny.TOKENS.index("\n")
    _, (done,) = Asked(engine, model, "a", max_tokens=200, time_limit=1e-6, chain=f"logit_bias {newline} 100;temp 0").read()
    assert done.n_generated == 1 and done.stop_type == "limit"
    for limit, bias in ((1e-6, "-inf"), (1e9, "100"), (0.0, "100"), (-1.0, "100")):
        chain = f"logit_bias {newline} {bias} {tiny.EOS} -inf;temp 0"
        _, (done,) = Asked(engine, model, "a", max_tokens=9, time_limit=limit, chain=chain).read()
        assert done.n_generated == 9


def test_indentation(engine: ggraph.Engine, model: ggraph.Model) -> None:
    newline, space = tiny.TOKENS.index("\n"), tiny.TOKENS.index("▁")
    chain = f"logit_bias {newline} 100 {space} 99;penalties 1 1 50 0;temp 0"
    (free,), _ = Asked(engine, model, "a", max_tokens=9, chain=chain).read()
    assert free == "\n \n \n \n \n"
    (text,), (done,) = Asked(engine, model, "a", max_tokens=9, chain=chain, n_indent=2).read()
    assert text == "\n " and done.stop_type == "limit" and done.n_generated == 3


def test_what_never_fits_is_refused_at_once(engine: ggraph.Engine, model: ggraph.Model) -> None:
    with pytest.raises(ggraph.ContextFull, match="exceeds the available context size"):
        Asked(engine, model, "x" * 300)
    with pytest.raises(ggraph.Error, match="needs 5 slots"):
        Asked(engine, model, "x", n=5)


def test_a_row_of_nan_fails_its_request_alone(engine: ggraph.Engine, model: ggraph.Model) -> None:
    class Refusing(ggraph.Sampler):
        def sample(self, logits: Any) -> int:
            raise ggraph.SamplerError("NaN in the row")
    good = Asked(engine, model, "the cat", max_tokens=20)
    bad = Asked(engine, model, "a", max_tokens=20, sampler=Refusing("temp 0", model.n_vocab))
    with pytest.raises(ggraph.SamplerError):
        bad.read()
    assert good.text() == lone(model, "the cat", 20) and idle(engine)


def test_a_failed_step_fails_its_requests_and_the_engine_lives(engine: ggraph.Engine, model: ggraph.Model) -> None:
    process = engine.ctx.process

    def broken(kind: str, batch: ggraph.Batch) -> None:
        raise RuntimeError("no")
    engine.ctx.process = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        Asked(engine, model, "a").read()
    engine.ctx.process = process  # type: ignore[method-assign]
    assert Asked(engine, model, "the cat").text() == lone(model, "the cat") and idle(engine)


def test_a_sink_that_fails_ends_its_request_alone(engine: ggraph.Engine, model: ggraph.Model) -> None:
    def sink(event: Any) -> None:
        raise ValueError
    engine.submit(ggraph.Request([5], [ggraph.Sampler("temp 0", model.n_vocab)], sink, max_tokens=50))
    assert Asked(engine, model, "the cat").text() == lone(model, "the cat") and idle(engine)


def test_close_ends_all(model: ggraph.Model) -> None:
    for engine in opened(model):
        asked = [Asked(engine, model, "a", max_tokens=10_000 if i else 200) for i in range(6)]
        engine.close()
        for a in asked:
            with pytest.raises(ggraph.Aborted):
                a.read()
        with pytest.raises(ggraph.Aborted, match="stopping"):
            Asked(engine, model, "a")


# --- slots on disk, embeddings


def test_save_and_restore(engine: ggraph.Engine, model: ggraph.Model, tmp_path: Path) -> None:
    prompt = "the rain in spain stays mainly "
    text, (done,) = Asked(engine, model, prompt, slot=0).read()
    n = engine.call(lambda: engine.slots[0].save(tmp_path / "s")).result(10)
    assert n == done.n_past
    engine.call(lambda: engine.slots[0].history.clear()).result(10)
    assert engine.call(lambda: engine.slots[2].restore(tmp_path / "s")).result(10) == n
    again, (second,) = Asked(engine, model, prompt, slot=2).read()
    assert again == text and second.n_cached == done.n_prompt - 1
    (tmp_path / "bad").write_bytes(b"no")
    with pytest.raises(ggraph.Error, match="cannot be restored"):
        engine.call(lambda: engine.slots[2].restore(tmp_path / "bad")).result(10)
    assert engine.slots[2].tokens == [] and idle(engine)


def test_embedder(model: ggraph.Model) -> None:
    with ggraph.Context(model, n_ctx=256, embeddings=True, pooling="mean", n_threads=1) as ctx, \
            ggraph.LLM(model, n_ctx=256, n_threads=1) as llm:
        embedder = ggraph.Embedder(ctx)
        texts = ["the rain", "a cat in the wind", "the rain"]
        rows = [f.result(10) for f in [embedder.submit(model.vocab.encode(t)) for t in texts]]
        assert np.array_equal(rows[0], rows[2])
        assert np.allclose(np.stack(rows), llm.embed(texts, pooling="mean", normalize=False), atol=1e-6)
        with pytest.raises(ggraph.ContextFull):
            embedder.submit([5] * 300)
        with pytest.raises(ggraph.Error):
            embedder.submit([])
        last = [embedder.submit(model.vocab.encode("the rain " * 20)) for _ in range(30)]
        embedder.close()
        assert all(f.done() for f in last) and isinstance(last[-1].exception(), ggraph.Aborted | None)
        with pytest.raises(ggraph.Aborted):
            embedder.submit([5])
