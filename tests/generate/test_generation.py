"""Generations: pieces, reasons to end, reuse, stopping."""
from __future__ import annotations

import math
import threading
import time
from typing import Any

import numpy as np
import pytest

from ggraph.errors import ContextFull, Error
from ggraph.generate import LLM, Output
from tests import tiny

PROMPT = "the rain in an"


def test_pieces_are_the_text(llm: LLM) -> None:
    g = llm.generate(PROMPT, max_tokens=40, temperature=0.0)
    assert "".join(list(g)) == g.text
    assert len(g.tokens) == 40
    assert (g.finish_reason, g.stop_type) == ("length", "limit")
    assert g.text == llm.vocab.decode_bytes(g.tokens).decode(errors="replace")
    assert (g.timings.prompt_n, g.timings.eval_n, g.timings.sample_n) == (11, 39, 40)
    assert list(g) == []


def test_no_piece_holds_half_a_character(llm: LLM) -> None:
    out = Output(llm.vocab)
    byte = tiny.TOKENS.index("<0x00>")
    pieces = [out.push(byte + b) for b in "a🦙é".encode() + b"\xf0\x9f"]
    assert pieces == ["a", "", "", "", "🦙", "", "é", "", ""]
    assert out.finish("length") == "�"
    assert out.text == "a🦙é�"


def test_stop_strings_across_tokens(llm: LLM) -> None:
    whole = llm.generate(PROMPT, max_tokens=30, temperature=0.0).read()
    for at in range(len(whole) - 4):
        stop = whole[at:at + 4]
        g = llm.generate(PROMPT, max_tokens=30, temperature=0.0, stop=["never", stop])
        assert g.read() == whole[:whole.index(stop)]
        assert (g.finish_reason, g.stop_type, g.stopping_word) == ("stop", "word", stop)


def test_what_was_held_back_comes_at_the_end(llm: LLM) -> None:
    whole = llm.generate(PROMPT, max_tokens=30, temperature=0.0).read()
    g = llm.generate(PROMPT, max_tokens=30, temperature=0.0, stop=whole[-3:] + "...")
    assert g.read() == whole
    assert g.stop_type == "limit"


@pytest.mark.parametrize("special", [False, True])
def test_end_of_generation(llm: LLM, special: bool) -> None:
    g = llm.generate(PROMPT, logit_bias={tiny.EOS: 1000.0}, special=special)
    assert g.read() == ("</s>" if special else "")
    assert (g.tokens, g.finish_reason, g.stop_type) == ([tiny.EOS], "stop", "eos")


def test_no_tokens_at_all(llm: LLM) -> None:
    g = llm.generate(PROMPT, max_tokens=0)
    assert (g.read(), g.tokens, g.finish_reason, g.timings.prompt_n) == ("", [], "length", 11)


def test_the_context_fills(llm: LLM) -> None:
    g = llm.generate(PROMPT, ignore_eos=True, seed=1)
    g.read()
    assert (g.finish_reason, g.stop_type) == ("length", "context")
    assert len(g.prompt) + len(g.tokens) == llm.ctx.n_ctx        # llama.cpp leaves the last cell free, too
    assert g.shifted == 0


@pytest.mark.parametrize("n_keep", [0, 4, -1, 1000])
def test_context_shift(llm: LLM, n_keep: int) -> None:
    g = llm.generate(PROMPT, ignore_eos=True, seed=1, context_shift=True, n_keep=n_keep, max_tokens=400)
    g.read()
    assert (len(g.tokens), g.finish_reason) == (400, "length")
    assert g.shifted >= 1
    kept = len(g.prompt) if n_keep < 0 else min(n_keep + 1, 11)        # with BOS
    assert llm._history.tokens[:kept] == g.prompt[:kept]
    assert llm._history.tokens[-50:] == g.tokens[-51:-1]


def test_a_prompt_too_long(llm: LLM) -> None:
    with pytest.raises(ContextFull, match="has 256 tokens, the context holds 256"):
        llm.generate([5] * 256)
    g = llm.generate([5] * 255)
    g.read()
    assert len(g.tokens) == 1 and g.finish_reason in ("stop", "length")


def test_no_prompt(llm: LLM) -> None:
    with pytest.raises(Error, match="the prompt is empty"):
        llm.generate([])
    assert llm.generate("", max_tokens=1).prompt == [tiny.BOS]


def test_the_same_request_gives_the_same_text(llm: LLM) -> None:
    """With penalties, which see the prompt whether it was in the cache or not."""
    ask: dict[str, Any] = dict(max_tokens=25, seed=7, temperature=1.5, repeat_penalty=3.0, ignore_eos=True)
    first = llm.generate(PROMPT * 3, **ask)
    first.read()
    second = llm.generate(PROMPT * 3, **ask)
    assert (second.read(), second.tokens) == (first.text, first.tokens)
    assert (first.timings.cache_n, second.timings.cache_n) == (0, len(first.prompt) - 1)
    other = llm.generate(PROMPT * 3, **{**ask, "repeat_penalty": 1.0})
    assert other.read() != first.text


def test_a_longer_conversation_goes_on_from_what_is_there(llm: LLM) -> None:
    g = llm.generate(PROMPT, max_tokens=10, temperature=0.0)
    g.read()
    nxt = llm.generate([*g.prompt, *g.tokens, 261, 270], max_tokens=5, temperature=0.0)
    nxt.read()
    assert nxt.timings.cache_n == len(g.prompt) + 9         # the last token was never evaluated


def test_logprobs(llm: LLM) -> None:
    g = llm.generate(PROMPT, max_tokens=6, seed=2, logprobs=3)
    g.read()
    assert [p.token for p in g.logprobs] == g.tokens
    for p in g.logprobs:
        assert len(p.top) == 3
        values = [v for _, v in p.top]
        assert values == sorted(values, reverse=True) and sum(map(math.exp, values)) <= 1
        assert p.logprob <= values[0]
    scores = llm.score([*g.prompt, *g.tokens])[-6:]
    np.testing.assert_allclose([p.logprob for p in g.logprobs], [s.logprob for s in scores], atol=1e-4)
    assert llm.generate(PROMPT, max_tokens=1, logprobs=0).read() is not None


def test_leaving_early_costs_nothing(llm: LLM) -> None:
    want = llm.generate(PROMPT, max_tokens=20, temperature=0.0).read()
    for _ in llm.generate("the air", max_tokens=20, temperature=0.0):
        break
    assert llm.generate(PROMPT, max_tokens=20, temperature=0.0).read() == want


def test_one_text_at_a_time(llm: LLM) -> None:
    a, b = llm.generate(PROMPT, max_tokens=50), llm.generate("in the air", max_tokens=50)
    next(a)
    b.read()
    with pytest.raises(Error, match="another text was begun"):
        a.read()


def test_stop_between_tokens(llm: LLM) -> None:
    want = llm.generate(PROMPT, max_tokens=20, temperature=0.0).read()
    g = llm.generate(PROMPT, max_tokens=20, temperature=0.0, stop=want[5:8] + "never")
    for i, _ in enumerate(g):
        if i == 4:
            g.stop()
    assert g.finish_reason == "cancelled"
    assert g.text and want.startswith(g.text)
    assert llm.generate(PROMPT, max_tokens=20, temperature=0.0).read() == want


def test_stop_within_the_prompt(llm: LLM) -> None:
    seen: list[int] = []

    def progress(done: int, total: int) -> None:
        seen.append(done)
        if done == 32:
            g.stop()

    g = llm.generate([5 + i % 200 for i in range(100)], progress=progress)
    assert g.read() == ""
    assert g.finish_reason == "cancelled"
    assert seen == [0, 16, 32]
    assert len(llm._history.tokens) == g.timings.prompt_n == 32
    want = llm.generate(PROMPT, max_tokens=5, temperature=0.0).read()
    with LLM(llm.model, n_ctx=256) as fresh:
        assert fresh.generate(PROMPT, max_tokens=5, temperature=0.0).read() == want


def test_stop_from_another_thread(llm: LLM) -> None:
    want = llm.generate(PROMPT, max_tokens=5, temperature=0.0).read()
    for delay in (0.0, 0.003, 0.01, 0.02):
        g = llm.generate(PROMPT, ignore_eos=True, context_shift=True)
        timer = threading.Timer(delay, g.stop)
        timer.start()
        start = time.perf_counter()
        g.read()
        assert g.finish_reason == "cancelled"
        assert time.perf_counter() - start < 5
        timer.join()
        assert llm.generate(PROMPT, max_tokens=5, temperature=0.0).read() == want


def test_progress_covers_the_prompt(llm: LLM) -> None:
    seen: list[tuple[int, int]] = []
    llm.generate([5 + i for i in range(40)], max_tokens=3, progress=lambda *at: seen.append(at)).read()
    assert seen == [(0, 40), (16, 40), (32, 40), (40, 40)]
