"""The chain: its words, its memory, its seeds, and what it does with bad rows and with a grammar."""
from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ggraph.errors import SamplerError
from ggraph.sampling import Sampler, default_chain
from ggraph.sampling.candidates import Candidates
from ggraph.sampling.samplers import WORDS
from tests.sampling.rows import EVERYTHING, F32, LETTERS, PICKERS, draw, frozen, left, some_rows

# --- the chain ------------------------------------------------------------------------------------

@pytest.mark.parametrize(("chain", "names"), [
    ("topk 4", "topk"), ("top_k", "top_k"), ("top_k 4 5", "top_k"), ("top_k x", "top_k"), ("top_k 1.5", "top_k"),
    ("top_p nan", "top_p"), ("temp inf", "temp"), ("temp 1e39", "temp"), ("penalties 64 0 0 0", "penalties"),
    ("penalties 64 -1 0 0", "penalties"), ("dist -2", "dist"), ("dist 4294967296", "dist"), ("greedy 1", "greedy"),
    ("mirostat 1 5 0.1 0", "mirostat"), ("logit_bias", "logit_bias"), ("logit_bias 1", "logit_bias"),
    ("logit_bias 8 1", "logit_bias"), ("logit_bias -1 1", "logit_bias"), ("logit_bias 1 inf", "logit_bias"),
    ("top_k 99999999999", "top_k"), ("top_k " + "9" * 5000, "top_k"), ("temp_ext 1", "temp_ext"),
])
def test_a_bad_chain_is_named_with_its_usage_or_the_known_words(chain: str, names: str) -> None:
    with pytest.raises(SamplerError) as caught:
        Sampler(chain, 8, LETTERS)
    said = str(caught.value)
    assert names in said
    assert f"{names} {WORDS[names].usage}".strip() in said if names in WORDS else all(word in said for word in WORDS)


@given(st.text(st.sampled_from("dist greedy;top_k10.-e\n\0é"), max_size=30))
def test_any_text_is_a_chain_or_an_error(chain: str) -> None:
    with suppress(SamplerError):
        Sampler(chain, 8).sample(frozen(range(8)))


def test_nothing_may_follow_the_picker() -> None:
    with pytest.raises(SamplerError, match="dist picks"):
        Sampler("dist 1;top_k 5", 8)


@pytest.mark.parametrize("chain", ["", " ; ", "top_k 3;top_p 0.9", "min_p 0.1;temp 0.5", "greedy"])
def test_a_chain_without_a_picker_ends_in_greedy(chain: str) -> None:
    assert Sampler(chain, 4).sample(frozen([0, 3, 9, 9])) == 2


def test_what_does_nothing_is_left_out() -> None:
    off = ("top_k 0;top_k -1;top_p 1;min_p 0;typical 1;top_n_sigma -1;xtc 0 0.1 1;xtc 1 0.6 1;temp 1;temp_ext 1 0 1;"
           "penalties 64 1 0 0;dry 0 1.75 2 64;dry 1 0.5 2 64;dist 1")
    assert [step.word for step in Sampler(off, 8)._steps] == [WORDS["dist"]]
    rows = some_rows()
    assert draw(Sampler(off, 60), rows) == draw(Sampler("dist 1", 60), rows)


def test_the_order_of_words_counts() -> None:
    row = frozen([3, 2, 1])
    assert left("top_p 0.8;temp 0.5", row)[0] == [0, 1]
    assert left("temp 0.5;top_p 0.8", row)[0] == [0]


def test_a_banned_token_is_never_drawn() -> None:
    row = frozen([9, 1, 1])
    for picker in PICKERS:
        assert 0 not in draw(Sampler(f"logit_bias 0 -inf;{picker}", 3), frozen([row] * 20))
    assert Sampler("logit_bias 0 -100", 3).sample(row) == 1
    assert Sampler("logit_bias 0 -5 0 -5", 3).sample(row) == 1      # twice the same token: both count
    assert Sampler("top_k 2;logit_bias 0 -inf;top_p 0.5;dist 1", 3).sample(row) != 0


def test_temperature_zero_takes_the_best() -> None:
    for word in ("temp 0", "temp -1", "temp_ext 0 0 1"):
        assert draw(Sampler(f"{word};dist 1", 60), some_rows()) == some_rows().argmax(axis=1).tolist()


# --- memory ---------------------------------------------------------------------------------------

@settings(max_examples=30, deadline=None)
@given(st.sampled_from(PICKERS), st.integers(0, 11), st.integers(0, 2**32))
def test_clone_goes_on_alike(picker: str, at: int, seed: int) -> None:
    rows = some_rows(seed % 2**32)
    first = Sampler(EVERYTHING + picker, 60, LETTERS)
    whole = draw(Sampler(EVERYTHING + picker, 60, LETTERS), rows)
    assert draw(first, rows[:at]) == whole[:at]
    twin = first.clone()
    assert draw(first, rows[at:]) == whole[at:]
    assert draw(twin, rows[at:]) == whole[at:]      # and what `first` did since has not touched it


@pytest.mark.parametrize("picker", PICKERS)
def test_reset_is_a_fresh_start(picker: str) -> None:
    rows, sampler = some_rows(), Sampler(EVERYTHING + picker, 60, LETTERS)
    first = draw(sampler, rows)
    sampler.reset()
    assert draw(sampler, rows) == first


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=30), st.lists(st.integers(0, 5), min_size=8, max_size=20))
def test_only_the_window_counts(before: list[int], window: list[int]) -> None:
    n, row = len(window), some_rows()[0]
    chain = f"penalties {n} 1.3 0.2 0.2;dry 1 1.5 1 {n}"
    long, short = Sampler(chain, 60, LETTERS), Sampler(chain, 60, LETTERS)
    for token in before + window:
        long.accept(token)
    for token in window:
        short.accept(token)
    assert left_of(long, row) == left_of(short, row)


def left_of(sampler: Sampler, row: F32) -> list[float]:
    c = Candidates(row)
    for step in sampler._steps:
        step.run(c)
    logits: list[float] = c.logits.tolist()
    return logits


def test_sampling_without_accepting_leaves_no_trace_in_the_window() -> None:
    row, sampler = frozen([2, 1.9]), Sampler("penalties 8 1 1 0", 2)
    assert [sampler.sample(row) for _ in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("chain", ["penalties 64 3 0 0", "penalties 64 1 0 50", "penalties 64 1 5 0"])
def test_each_penalty_works_alone(chain: str) -> None:
    sampler = Sampler(chain, 4)
    for _ in range(8):
        sampler.accept(1)
    assert sampler.sample(frozen([0, 9, 8, 0])) == 2


def test_a_window_of_zero_is_off() -> None:
    sampler = Sampler("penalties 0 2 1 1;dry 1 1.75 2 0", 4)    # and needs no vocabulary
    sampler.accept(1)
    assert len(sampler._steps) == 1 and sampler.sample(frozen([0, 9, 8.9, 0])) == 1


def test_adaptive_p_learns_only_from_the_token_it_drew() -> None:
    sampler = Sampler("adaptive_p 0.5 0.9 1", 3)
    state: Any = sampler._steps[-1].state
    before = state.sum
    sampler.accept((sampler.sample(frozen([1, 1, 1])) + 1) % 3)
    assert state.sum == before
    sampler.accept(sampler.sample(frozen([1, 1, 1])))
    assert state.sum != before


# --- seeds ----------------------------------------------------------------------------------------

def test_a_fresh_seed_is_told_and_repeats_the_draws() -> None:
    rows, chain = some_rows(), "xtc 0.5 0.05 {0};temp 3;dist {0}"
    fresh = Sampler(chain.format(-1), 60)
    first = draw(fresh, rows)
    assert fresh.seed is not None and 0 <= fresh.seed < 2**32 - 1
    assert draw(Sampler(chain.format(fresh.seed), 60), rows) == first
    assert Sampler(chain.format(-1), 60).seed != fresh.seed
    assert Sampler("dist 4294967295", 60).seed != 4294967295        # -1, as an unsigned number
    before = fresh.seed
    fresh.reset()
    assert fresh.seed != before and fresh.clone().seed == fresh.seed


def test_the_seed_in_use() -> None:
    assert Sampler("dist 7", 8).seed == 7
    assert Sampler("greedy", 8).seed is None
    assert Sampler("temp 1.5;dist 5", 60).seed == 5     # a seed asks for no temperature of 0
    assert draw(Sampler("temp 5;dist 5", 60), some_rows()) != some_rows().argmax(axis=1).tolist()


# --- rows -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("chain", ["greedy", "dist 1", default_chain(), "mirostat 1 5 0.1 100", "typical 0.5;dist 1"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_logit_that_is_no_number(chain: str, bad: float) -> None:
    row = np.zeros(60, np.float32)
    row[17] = bad
    with pytest.raises(SamplerError, match=f"token 17 is {bad}"):
        Sampler(chain, 60).sample(frozen(row))


@pytest.mark.parametrize("chain", ["greedy", "logit_bias 0 5", "logit_bias 0 5;typical 0.9;dist 1"])
def test_no_token_left(chain: str) -> None:
    with pytest.raises(SamplerError, match="no token is left"):
        Sampler(chain, 3).sample(frozen([-np.inf] * 3))


@pytest.mark.parametrize("picker", PICKERS)
def test_all_tokens_banned_by_the_chain(picker: str) -> None:
    with pytest.raises(SamplerError, match="no token is left"):
        Sampler(f"logit_bias 0 -inf 1 -inf;{picker}", 2).sample(frozen([1, 2]))


def test_a_temperature_that_overflows() -> None:
    with pytest.raises(SamplerError, match="too near 0"):
        Sampler("temp 1e-38;dist 1", 2).sample(frozen([1, 200]))


@pytest.mark.parametrize("picker", PICKERS)
@pytest.mark.parametrize("row", [[3.4e38, -3.4e38, 0], [0, -np.inf, -np.inf], [1e-45, 0, 0], [-1e38, -1e38, -1e38]])
def test_extreme_rows(picker: str, row: list[float]) -> None:
    for cut in "", "top_k 2", "top_p 0.5", "typical 0.5", "top_n_sigma 1", "temp_ext 1 1 1", "xtc 1 0.1 1;min_p 0.1":
        assert Sampler(f"{cut};{picker}", 3).sample(frozen(row)) in (0, 1, 2)


def test_shapes_and_types() -> None:
    sampler = Sampler("greedy", 3)
    assert sampler.sample(np.array([0.0, 2.0, 1.0])) == 1 and type(sampler.sample(frozen([0, 2, 1]))) is int
    for shape in (2,), (1, 3), ():
        with pytest.raises(SamplerError, match="shape"):
            sampler.sample(np.zeros(shape, np.float32))
    for token in (-1, 3):
        with pytest.raises(SamplerError, match="not in 0..2"):
            sampler.accept(token)
    with pytest.raises(SamplerError, match="n_vocab"):
        Sampler("greedy", 0)


def test_the_row_is_not_changed() -> None:
    rows = some_rows().copy()
    for picker in PICKERS:
        draw(Sampler(EVERYTHING + picker, 60, LETTERS), rows)
        draw(Sampler("penalties 4 2 1 1;" + picker, 60), rows)
    assert np.array_equal(rows, some_rows())


# --- grammar --------------------------------------------------------------------------------------

class Multiples:
    """A toy grammar: token i may come if it is a multiple of the number of tokens so far, plus two."""

    def __init__(self, n_vocab: int, n_masks: int = 0):
        self.n_vocab, self.n_masks, self.seen = n_vocab, n_masks, list[int]()

    def accepts(self, token: int) -> bool:
        return token % (len(self.seen) + 2) == 0

    def mask(self) -> NDArray[np.bool_]:
        self.n_masks += 1
        return np.array([self.accepts(token) for token in range(self.n_vocab)])

    def accept(self, token: int) -> None:
        assert self.accepts(token)
        self.seen.append(token)

    def clone(self) -> Multiples:
        twin = Multiples(self.n_vocab, self.n_masks)
        twin.seen = self.seen.copy()
        return twin

    def reset(self) -> None:
        self.seen.clear()


@pytest.mark.parametrize("picker", PICKERS)
def test_every_token_fits_the_grammar(picker: str) -> None:
    sampler = Sampler(EVERYTHING + picker, 60, LETTERS, Multiples(60))
    sampler.accept(1, generated=False)      # of the prompt: for the window, not for the grammar
    tokens = draw(sampler, some_rows())
    assert all(t % (i + 2) == 0 for i, t in enumerate(tokens))


def test_the_mask_is_made_only_where_the_token_is_refused() -> None:
    grammar = Multiples(4)
    sampler = Sampler("greedy", 4, grammar=grammar)
    assert sampler.sample(frozen([0, 1, 9, 8])) == 2 and grammar.n_masks == 0
    assert sampler.sample(frozen([0, 1, 5, 9])) == 2 and grammar.n_masks == 1


def test_a_refused_token_has_used_its_draw() -> None:
    """As in llama.cpp, where the chain is run again with the generators as they are."""
    row = frozen([0, 1, 0, 1])
    seed = next(s for s in range(100) if draw(Sampler(f"dist {s}", 4), frozen([row]))[0] % 2)
    masked = frozen([0, -np.inf, 0, -np.inf])
    second = draw(Sampler(f"dist {seed}", 4), frozen([row, masked]))[1]
    assert Sampler(f"dist {seed}", 4, grammar=Multiples(4)).sample(row) == second


def test_a_grammar_that_allows_nothing_left() -> None:
    with pytest.raises(SamplerError, match="no token is left"):
        Sampler("greedy", 3, grammar=Multiples(3)).sample(frozen([-np.inf, 1, -np.inf]))


def test_grammar_follows_clone_and_reset() -> None:
    sampler = Sampler("greedy", 60, grammar=Multiples(60))
    first = draw(sampler, some_rows()[:4])
    twin = sampler.clone()
    assert draw(twin, some_rows()[4:]) == draw(sampler, some_rows()[4:])
    sampler.reset()
    assert draw(sampler, some_rows()[:4]) == first
