"""Recurrent layers go back by as many tokens as was asked for, and equal a recompute, in every architecture that has some."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ggraph
from ggraph.errors import Error
from tests import spec
from tests.test_context import EXACT, alone, context, feed, ids

BACK = 3
NAMES = ("bailingmoe3-moe", "falcon-h1-dense", "granitehybrid-dense-b", "jamba-dense", "kimi-k3-moe", "kimi-linear-moe",
         "lfm2-dense", "lfm2moe-moe", "mamba-dense", "mamba2-dense-b", "nemotron_h_moe-dense", "plamo2-dense", "qwen35moe-moe-b",
         "qwen3next-moe", "qwen4exp-moe")


@pytest.mark.parametrize("name", NAMES)
def test_rollback_equals_a_recompute(tmp_path: Path, name: str) -> None:
    """From 0 to BACK tokens, which came together or one by one, after texts that are shorter than that, and longer."""
    with ggraph.Model(spec.write(spec.specs()[name], tmp_path / "m.gguf")) as model, \
            context(model, n_rollback=BACK, n_seq_max=2) as ctx:
        want = alone(model, 0, 16)
        for n in (1, 9):
            for wrong in range(BACK + 1):
                for together in (True, False):
                    ctx.memory.clear()
                    feed(ctx, [(t, s) for s in (0, 1) for t in ids(s, n)])
                    keep = n + BACK - wrong
                    draft = [(t, 0) for t in ids(0, keep)[n:] + ids(9, wrong)]
                    for rows in [draft] if together else [[row] for row in draft]:
                        feed(ctx, rows)
                    assert ctx.memory.seq_rm(0, keep, -1)
                    got = feed(ctx, [(t, 0) for t in ids(0, 16)[keep:]])
                    error = np.abs(got - want[keep:]).max() / np.abs(want).max()
                    assert error <= (0 if EXACT else 1e-3), (n, wrong, together)


def test_what_cannot_go_back_says_so(tmp_path: Path) -> None:
    with ggraph.Model(spec.write(spec.specs()["minimax-01-moe"], tmp_path / "m.gguf")) as model, \
            pytest.raises(Error, match="keeps no earlier states: give n_rollback=0"):
        context(model, n_rollback=1)
