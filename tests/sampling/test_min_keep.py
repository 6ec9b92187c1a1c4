"""MIN_KEEP: samplers that cut leave at least so many candidates, which are the next ones that they had kept."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ggraph import SamplerError, default_chain
from ggraph.sampling import Sampler


def left(chain: str, row: Any) -> list[int]:
    sampler = Sampler(f"{chain};greedy", len(row))
    sampler.sample(row)
    c = sampler._last
    assert c is not None
    return [c.token(i) for i in range(len(c))]


@pytest.mark.parametrize("n_vocab", [5, 60, 2000])
@pytest.mark.parametrize("word", ["top_p 0.3", "min_p 0.4", "typical 0.3", "temp 2;top_k 50;min_p 0.9"])
def test_at_least_so_many(word: str, n_vocab: int) -> None:
    for seed in range(8):
        row = (np.random.RandomState(seed).standard_normal(n_vocab) * 3).astype(np.float32)
        free = left(word, row)
        most = min(n_vocab, 50 if "top_k" in word else n_vocab)
        for n in (0, 1, 2, 7, 400, 10**6):
            kept = left(f"{word} {n}", row)
            assert len(kept) == max(len(free), min(n, most)) and set(free) <= set(kept)
            if "typical" not in word:
                lost = set(range(n_vocab)) - set(kept)
                assert not lost or row[kept].min() >= row[list(lost)].max()


def test_xtc_does_not_drop_below() -> None:
    row = np.log(np.array([0.3, 0.25, 0.2, 0.15, 0.1], np.float32))
    assert left("xtc 1 0.12 3", row) == left("xtc 1 0.12 3 2", row) == [3, 4]
    assert left("xtc 1 0.12 3 3", row) == [0, 1, 2, 3, 4]


def test_in_words() -> None:
    assert "top_p 0.95 4;min_p 0.05 4;xtc 0.0 0.1 5 4" in default_chain(min_keep=4, seed=5)
    assert "top_p 0.95;min_p 0.05;" in default_chain()
    for bad in ("top_p 0.5 -1", "top_p 0.5 x", "top_p 0.5 1 2", "top_p"):
        with pytest.raises(SamplerError, match="MIN_KEEP"):
            Sampler(bad, 8)
