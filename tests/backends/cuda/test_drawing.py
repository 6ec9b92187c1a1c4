"""Tokens of many rows drawn in one step: each row by its own chain, in batch order; a server's answers as those of one alone."""
from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggraph
from ggraph.backends.cuda import Cuda
from ggraph.backends.cuda.emulator import Emulator

USUAL = "top_k 40;top_p 0.95;min_p 0.05;temp 0.8;dist"
CHAINS = ["temp 0", f"{USUAL} 1", "temp 2;dist 2", f"{USUAL} 3", "min_p 0.01;dist 4"]
PROMPTS = ["the rain in an", "a", "rain in the rain", "an an an", "the rain in a"]
pytestmark = pytest.mark.usefixtures("emulated")


@pytest.mark.parametrize("name", ["dense", "hybrid"])
@pytest.mark.parametrize("options", [{}, {"n_ubatch": 3}, {"kv_unified": False}], ids=str)
def test_rows_come_in_the_order_of_the_batch(models: dict[str, Path], name: str, options: dict[str, Any]) -> None:
    """Rows of several sequences, some with more than one token, some without output: as the samplers draw on the host."""
    rows = [(seq, t, (seq + t) % 3 > 0) for t in range(4) for seq in range(3) if t < 2 + seq]
    n = sum(output for *_, output in rows)
    chains = [CHAINS[i % len(CHAINS)] for i in range(n)]
    found = []
    with ggraph.Model(models[name]) as model:
        for on_device in (True, False):
            with ggraph.Context(model, n_ctx=768, n_seq_max=3, n_batch=64, **options) as ctx:
                samplers = [ggraph.Sampler(chain, model.n_vocab) for chain in chains]
                batch = ggraph.Batch()
                for seq, t, output in rows:
                    batch.add(270 + 5 * seq + t, None, seq, output=output)
                if on_device:
                    drawing = ctx.drawing()
                    assert drawing is not None
                    drawing.take([sampler.steps() or [] for sampler in samplers])
                    drawing.draw([sampler.uniform() for sampler in samplers])
                    ctx.draw(batch, drawing)
                    found.append(drawing.pending()().tolist())
                else:
                    ctx.process("decode", batch)
                    found.append([sampler.sample(row) for sampler, row in zip(samplers, ctx.logits)])
    assert found[0] == found[1] and len(set(found[0])) > 3


class Answers:
    """Requests to one engine, each with its chain."""

    def __init__(self, model: ggraph.Model, engine: ggraph.Engine):
        self.model, self.engine = model, engine

    def ask(self, prompt: str, *chains: str, **options: Any) -> Callable[[], list[str]]:
        """Call what comes back to wait for the texts."""
        events: queue.Queue[Any] = queue.Queue()
        samplers = [ggraph.Sampler(chain, self.model.n_vocab) for chain in chains]
        self.engine.submit(ggraph.Request(self.model.vocab.encode(prompt), samplers, events.put, **{"max_tokens": 14, **options}))

        def read() -> list[str]:
            texts, n_done = [""] * len(chains), 0
            while n_done < len(chains):
                event = events.get(timeout=60)
                assert not isinstance(event, ggraph.Failed), event.error
                n_done += isinstance(event, ggraph.Done)
                if isinstance(event, ggraph.Piece):
                    texts[event.index] += event.text
            return texts
        return read


@pytest.fixture
def answers(models: dict[str, Path]) -> Iterator[Answers]:
    with ggraph.Model(models["dense"]) as model, ggraph.Context(model, n_ctx=256, n_seq_max=5, n_ubatch=32) as ctx:
        engine = ggraph.Engine(ctx, model.vocab)
        yield Answers(model, engine)
        engine.close()


def alone(answers: Answers, prompt: str, chain: str) -> str:
    """The same text from a Context of its own, its tokens chosen on the host."""
    with ggraph.LLM(answers.model, n_ctx=256, n_ubatch=32) as llm:
        sampler = ggraph.Sampler("logit_bias 5 0;" + chain, answers.model.n_vocab)
        g = llm.generate(prompt, max_tokens=14, sampler=sampler)
        assert g._drawn is None
        return g.read()


def test_answers_are_those_of_one_alone_and_ids_alone_come_back(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = answers.engine.ctx.backends[0]
    assert isinstance(backend, Cuda) and isinstance(backend.device, Emulator)
    expected, fetched, fetch = [alone(answers, *case) for case in zip(PROMPTS, CHAINS)], list[int](), backend.device._fetch

    def watched(address: int, nbytes: int) -> Callable[[], np.ndarray]:
        fetched.append(nbytes)
        return fetch(address, nbytes)
    monkeypatch.setattr(backend.device, "_fetch", watched)
    backend.device.counts.clear()
    reads = [answers.ask(*case) for case in zip(PROMPTS, CHAINS)]
    assert [read()[0] for read in reads] == expected
    assert max(fetched) > 4 and set(fetched) <= {4 * n for n in range(1, 6)}
    assert backend.device.counts["downloads"] == len(fetched)


def test_a_round_with_one_that_the_device_cannot_draw(answers: Answers) -> None:
    """Rounds change between device and host while another text asks for log-probabilities; random numbers go on."""
    expected = [alone(answers, *case) for case in zip(PROMPTS, CHAINS)]
    asked: list[dict[str, Any]] = [{}, {}, {"logprobs": 2, "max_tokens": 5}, {}, {}]
    reads = [answers.ask(*case, **options) for *case, options in zip(PROMPTS, CHAINS, asked)]
    found = [read()[0] for read in reads]
    assert found[:2] + found[3:] == expected[:2] + expected[3:] and expected[2].startswith(found[2])


def test_choices_that_share_a_prompt(answers: Answers) -> None:
    """Their first tokens come of one row."""
    assert answers.ask(PROMPTS[0], *CHAINS)() == [alone(answers, PROMPTS[0], chain) for chain in CHAINS]


def test_a_batch_that_fails_takes_no_random_number(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is short of cells is done again with less."""
    ctx, expected, failed = answers.engine.ctx, alone(answers, PROMPTS[0], CHAINS[2]), list[bool]()
    draw = ctx.draw

    def failing(*args: Any) -> None:
        if len(failed) in (2, 5):
            failed.append(True)
            raise ggraph.ContextFull("the test wants it")
        failed.append(False)
        draw(*args)
    answers.ask("a", "temp 0", max_tokens=1)()                    # leaves an idle slot that can be forgotten
    monkeypatch.setattr(ctx, "draw", failing)
    monkeypatch.setattr(answers.engine, "_make_room", lambda: None)
    assert answers.ask(PROMPTS[0], CHAINS[2])()[0] == expected and sum(failed) == 2


def test_logits_that_cannot_be_drawn_from_end_that_request(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx, draw = answers.engine.ctx, answers.engine.ctx.draw

    def spoiled(batch: Any, drawing: Any) -> None:
        draw(batch, drawing)
        drawing._drawn = [(np.arange(1), lambda: np.full(1, -1, np.int32))]
    monkeypatch.setattr(ctx, "draw", spoiled)
    with pytest.raises(AssertionError, match="highest logit is not finite"):
        answers.ask(PROMPTS[0], CHAINS[1])()
    monkeypatch.setattr(ctx, "draw", draw)
    assert answers.ask(PROMPTS[0], CHAINS[1])()[0] == alone(answers, PROMPTS[0], CHAINS[1])
