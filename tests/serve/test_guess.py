"""Guesses of many slots, judged together: every text is that of plain decoding, whoever guesses, and memory holds the same."""
from __future__ import annotations

import queue
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import ggraph
from ggraph import env
from ggraph.serve.guess import Ask, EachAlone, FirstOf, Guesser, ModelGuesser
from tests import nextn, spec, tiny
from tests.serve.test_engine import Asked, idle, lone, opened
from tests.serve.test_shelf import read

NAMES = ("llama-dense-b", "gemma3-dense-b", "qwen35-dense-b")
N = 12


class Always:
    """Guesses one token, right or wrong."""

    def __init__(self, token: int = 3):
        self.token = token

    def propose(self, tokens: Sequence[int], n: int, sampler: ggraph.Sampler) -> list[int]:
        return [self.token] * n

    def abort(self) -> None: ...


class Oracle:
    """Knows the texts to come, and errs in every `wrong`-th token."""

    def __init__(self, texts: Sequence[Sequence[int]], wrong: int):
        self.texts, self.wrong = texts, wrong

    def propose(self, asked: Sequence[Ask]) -> list[list[int]]:
        return [self._one(a) for a in asked]

    def _one(self, a: Ask) -> list[int]:
        n = len(a.tokens)
        text = next((t for t in self.texts if list(t[:n]) == a.tokens), [])
        return [(t + ((n + i) % self.wrong == 0)) % 128 for i, t in enumerate(text[n:n + a.n])]

    def abort(self) -> None: ...


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ggraph.Model]]:
    folder = tmp_path_factory.mktemp("models")
    made = {n: ggraph.Model(spec.write(spec.specs()[n], folder / f"{n}.gguf")) for n in NAMES}
    made["tiny"] = ggraph.Model(tiny.write(folder / "tiny.gguf"))
    yield made
    for model in made.values():
        model.close()


@contextmanager
def engine(model: ggraph.Model, guesser: Guesser | None = None, n_draft: int = 4, **options: Any) -> Iterator[ggraph.Engine]:
    context = {"n_ctx": 512, "n_seq_max": 4, "n_ubatch": 32, "n_threads": 1, "n_rollback": 4, **options}
    with ggraph.Context(model, **context) as ctx:
        engine = ggraph.Engine(ctx, model.vocab, guesser=guesser, n_draft=n_draft, cache_bytes=1 << 22)
        try:
            yield engine
        finally:
            engine.close()


def prompts() -> list[list[int]]:
    return [[random.Random(i).randrange(128) for _ in range(n)] for i, n in enumerate((1, 2, 17, 40, 5, 70))]


def answers(e: ggraph.Engine, chain: str) -> list[tuple[list[int], ggraph.Done]]:
    """All prompts at once; the tokens of each and its end."""
    running = []
    for prompt in prompts():
        events: queue.Queue[Any] = queue.Queue()
        sampler = ggraph.Sampler(chain, e.ctx.model.n_vocab)
        e.submit(ggraph.Request(prompt, [sampler], events.put, max_tokens=N, logprobs=0))
        running.append(events)
    return [read(events) for events in running]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chain", ["temp 0", "penalties 64 1.1 0 0;temp 0.8;dist 7"], ids=["greedy", "seeded"])
def test_every_text_is_that_of_plain_decoding(models: dict[str, ggraph.Model], name: str, chain: str) -> None:
    with engine(models[name]) as e:
        plain = answers(e, chain)
        assert all(done.draft_n == 0 for _, done in plain)
    whole = [[*p, *tokens] for p, (tokens, _) in zip(prompts(), plain)]
    guessers: list[Guesser] = [EachAlone([Always()]), EachAlone([ggraph.NgramDraft(least=1)]),
                               *(Oracle(whole, wrong) for wrong in (2, 3, 99)),
                               FirstOf([EachAlone([ggraph.NgramDraft(least=2)]), Oracle(whole, 4)])]
    for guesser in guessers:
        with engine(models[name], guesser) as e:
            found = answers(e, chain)
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in plain], guesser
            assert [done.n_past for _, done in found] == [done.n_past for _, done in plain] and idle(e)
            assert e.stats.draft_n == sum(d.draft_n for _, d in found)
            assert sum(e.stats.accepted) == sum(d.draft_n_accepted for _, d in found)
    with engine(models[name], Oracle(whole, 999)) as e:
        found = answers(e, chain)
        assert all(d.draft_n == d.draft_n_accepted >= N // 2 for _, d in found)
        assert e.stats.n_decode < 40 and sum(e.stats.accepted) == sum(d.draft_n for _, d in found)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_model_guesses_right(models: dict[str, ggraph.Model], name: str) -> None:
    """Texts that are guessed on together, with prompts longer than an ubatch to catch up with."""
    chain = "temp 0.7;dist 5"
    with engine(models[name]) as e:
        plain = answers(e, chain)
    with ggraph.Context(models[name], n_ctx=512, n_seq_max=4, n_ubatch=16, n_threads=1, n_rollback=4) as draft:
        with engine(models[name], ModelGuesser(draft)) as e:
            found = answers(e, chain)
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in plain] and idle(e)
            if env.get("GGRAPH_BACKEND") != "ref":          # BLAS sums in an order that depends on the shape
                assert all(d.draft_n == d.draft_n_accepted for _, d in found) and found[0][1].draft_n > 4
        unsure = ModelGuesser(draft, p_min=1.0, n_min=1)
        with engine(models[name], unsure) as e:
            assert [tokens for tokens, _ in answers(e, chain)] == [tokens for tokens, _ in plain] and e.stats.draft_n == 0


@pytest.mark.parametrize("name", ["qwen35-dense-b", "glm4moe-moe"])
def test_the_models_own_block_guesses_for_all_slots(name: str, tmp_path: Path) -> None:
    with ggraph.Model(nextn.write(name, tmp_path / "m.gguf")) as model:
        with engine(model) as e:
            plain = answers(e, "temp 0")
        with ggraph.Context(model, n_ctx=512, n_seq_max=4, n_ubatch=32, n_threads=1, n_rollback=4) as ctx:
            block = ggraph.Nextn(ctx)
            e = ggraph.Engine(ctx, model.vocab, guesser=EachAlone([ggraph.MtpDraft(block, seq) for seq in range(4)]), n_draft=3)
            found = answers(e, "temp 0")
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in plain] and e.stats.draft_n > 10 and idle(e)
            e.close()
            block.ctx.close()


def test_a_short_pool_of_the_models_own_block(tmp_path: Path) -> None:
    """What slots have given up is still in its memory; it makes room by itself, and no text waits for it."""
    asked = [[random.Random(i).randrange(128) for _ in range(90)] for i in range(10)]
    with ggraph.Model(nextn.write("glm4moe-moe", tmp_path / "m.gguf")) as model:
        found = []
        for guessing in (False, True):
            with ggraph.Context(model, n_ctx=256, n_seq_max=4, n_ubatch=32, n_threads=1) as ctx:
                block = ggraph.Nextn(ctx)
                guesser = EachAlone([ggraph.MtpDraft(block, seq) for seq in range(4)]) if guessing else None
                e = ggraph.Engine(ctx, model.vocab, guesser=guesser, n_draft=3)
                running: list[queue.Queue[Any]] = [queue.Queue() for _ in asked]
                for prompt, events in zip(asked, running):
                    e.submit(ggraph.Request(prompt, [ggraph.Sampler("temp 0", model.n_vocab)], events.put, max_tokens=24))
                found.append([read(events)[0] for events in running])
                assert idle(e) and (e.stats.draft_n > 100) == guessing
                e.close()
                block.ctx.close()
        assert found[0] == found[1]


def test_a_guesser_must_fit(models: dict[str, ggraph.Model]) -> None:
    with ggraph.Context(models["tiny"], n_ctx=256) as draft, ggraph.Context(models["tiny"], n_ctx=256, n_seq_max=2) as ctx:
        with pytest.raises(ggraph.Error, match="1 sequences, 2 are needed"):
            ModelGuesser(draft).check(ctx)
        with ggraph.Context(models["llama-dense-b"], n_ctx=256) as other, pytest.raises(ggraph.ModelError, match="cannot draft"):
            ModelGuesser(draft).check(other)


def test_a_short_pool_of_the_draft_model(models: dict[str, ggraph.Model]) -> None:
    model = models["tiny"]
    with (ggraph.Context(model, n_ctx=256, n_seq_max=4, n_threads=1) as draft,
          engine(model, ModelGuesser(draft), n_ctx=1024) as e):
        asked = [Asked(e, model, c * 60, max_tokens=40) for c in "aeio"]
        assert [a.text() for a in asked] == [lone(model, c * 60, 40) for c in "aeio"] and idle(e)


def test_a_recurrent_state_that_cannot_go_back_is_not_guessed_on(models: dict[str, ggraph.Model],
                                                                  capsys: pytest.CaptureFixture[str]) -> None:
    with engine(models["qwen35-dense-b"], EachAlone([Always()]), n_rollback=0) as e:
        assert all(d.draft_n == 0 for _, d in answers(e, "temp 0"))
    assert "n_rollback is 0" in capsys.readouterr().err


def test_a_guesser_that_fails_costs_nothing(models: dict[str, ggraph.Model]) -> None:
    class Broken(Always):
        def propose(self, tokens: Sequence[int], n: int, sampler: ggraph.Sampler) -> list[int]:
            raise RuntimeError("no")

    class Wild(Always):
        def propose(self, tokens: Sequence[int], n: int, sampler: ggraph.Sampler) -> list[int]:
            return [-1, 10**9][:n]
    model = models["tiny"]
    for drafter in (Broken(), Wild()):
        with engine(model, EachAlone([drafter])) as e:
            assert Asked(e, model, "the rain").text() == lone(model, "the rain") and idle(e)


def test_ends_inside_a_right_run(models: dict[str, ggraph.Model]) -> None:
    """Limits, stop strings, end of text and grammars hold, wherever in a run they come."""
    model = models["tiny"]
    with ggraph.Context(model, n_ctx=512, n_seq_max=4, n_threads=1) as draft:
        for plain, guessing in zip(opened(model), opened(model, guesser=ModelGuesser(draft), n_draft=6)):
            full = Asked(plain, model, "the rain in", max_tokens=30).text()
            ends: list[dict[str, Any]] = [{"max_tokens": n} for n in (0, 1, 2, 6, 7, 8)]
            ends += [{"stop": [full[at:at + 3]], "max_tokens": 30} for at in range(0, len(full) - 3, 5)]
            ends += [{"chain": f"logit_bias {tiny.EOS} {b};temp 0", "max_tokens": 30} for b in (0.2, 0.5, 1000)]
            for end in ends:
                want, (a,) = Asked(plain, model, "the rain in", **end).read()
                got, (b,) = Asked(guessing, model, "the rain in", **end).read()
                assert got == want and (a.stop_type, a.n_generated, a.n_past) == (b.stop_type, b.n_generated, b.n_past), end
            pytest.importorskip("llguidance")
            rule = 'root ::= ("the " | "rain " | "in ")+ "."'
            texts = [Asked(e, model, "the rain", grammar=ggraph.Grammar.gbnf(model.vocab, rule), max_tokens=30,
                           chain="temp 1;dist 3").text() for e in (plain, guessing)]
            assert texts[0] == texts[1] and guessing.stats.draft_n > 0 and idle(guessing)


@pytest.mark.parametrize("shift", [False, True])
def test_a_full_context(models: dict[str, ggraph.Model], shift: bool) -> None:
    model = models["tiny"]
    options: dict[str, Any] = {"chain": "logit_bias 2 -inf;temp 0.8;dist 1", "max_tokens": 300}
    guesser = EachAlone([ggraph.NgramDraft(least=1)])
    for plain, guessing in zip(opened(model, shift), opened(model, shift, guesser=guesser, n_draft=5)):
        (want,), (a,) = Asked(plain, model, "the rain", **options).read()
        (got,), (b,) = Asked(guessing, model, "the rain", **options).read()
        assert got == want and a.stop_type == b.stop_type and a.truncated == b.truncated


def test_a_short_pool_drops_guesses_first(models: dict[str, ggraph.Model]) -> None:
    model = models["tiny"]
    for e in opened(model, guesser=EachAlone([Always(264)]), n_draft=7):
        asked = [Asked(e, model, c * 40, max_tokens=60) for c in "aeio"]
        assert [a.text() for a in asked] == [lone(model, c * 40, 60) for c in "aeio"]
        assert e.stats.draft_n > 0 and idle(e)


def test_cancels_and_choices(models: dict[str, ggraph.Model]) -> None:
    model, rng = models["tiny"], random.Random(4)
    texts = ["".join(rng.choice("etaoin shr") for _ in range(rng.randrange(2, 60))) for _ in range(24)]
    want = {p: lone(model, p) for p in texts}
    got: dict[str, str] = {}
    with ggraph.Context(model, n_ctx=1024, n_seq_max=4, n_threads=1) as draft:
        for e in opened(model, guesser=ModelGuesser(draft), n_draft=3):
            def client(mine: list[str], e: ggraph.Engine = e) -> None:
                for i, p in enumerate(mine):
                    asked = Asked(e, model, p)
                    if i % 2:
                        e.cancel(asked.request)
                    else:
                        got[p] = asked.text()
            threads = [threading.Thread(target=client, args=(texts[i::6],)) for i in range(6)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            assert got == {p: want[p] for p in got} and len(got) >= 12 and idle(e)
            made, _ = Asked(e, model, "the cat", n=3).read()
            assert made[0] == lone(model, "the cat") and len(set(made)) == 3 and idle(e)
