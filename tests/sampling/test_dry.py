"""DRY: breakers are found in and across pieces, repetitions get less likely."""
from __future__ import annotations

import pytest

from ggraph.errors import SamplerError
from ggraph.sampling import Sampler
from ggraph.sampling.dry import breaker_table
from tests.sampling.rows import Pieces, frozen


def test_breakers_are_found_inside_and_across_pieces() -> None:
    vocab = Pieces([b"a", b"b", b"xa", b"xab", b"abx", b"c", b"ca"])
    assert breaker_table(vocab, ["ab", ""]) == {0: {(1,)}, 2: {(1,)}, 3: {()}, 4: {()}, 6: {(1,)}}
    assert breaker_table(vocab, ["abc"])[3] == {(5,)}
    assert breaker_table(vocab, ["abc"])[0] == {(1, 5)}


def test_long_breakers_are_cut() -> None:
    vocab = Pieces([b"a", b"b"])
    assert max(map(len, breaker_table(vocab, ["ab" * 100])[0])) == 20
    assert breaker_table(vocab, ["a" + "b" * 39 + "c"]) == breaker_table(vocab, ["a" + "b" * 39])


def test_breakers_are_looked_up_once_per_vocabulary() -> None:
    vocab = Pieces([b"a", b"\n"])
    for _ in range(3):
        Sampler("dry 1 1.75 2 64", 2, vocab).reset()
    assert vocab.asked == 2


def test_dry_needs_a_vocabulary() -> None:
    with pytest.raises(SamplerError, match="vocab"):
        Sampler("dry 0.8 1.75 2 64", 8)


def test_dry_lowers_what_would_repeat() -> None:
    for breakers, token in ((), 4), (("a",), 3):
        sampler = Sampler("dry 5 2 2 64", 6, Pieces([b"a", b"b", b"c", b"d", b"e", b"f"]), dry_breakers=breakers)
        for t in (1, 0, 2, 3, 1, 0, 2):
            sampler.accept(t)
        assert sampler.sample(frozen([0, 0, 0, 9, 8, 0])) == token
