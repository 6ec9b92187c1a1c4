"""Old files of Qwen 3 Next hold Q, K, V and z of a delta net in one matrix, group by group: the same model as with two."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ggraph
from tests import spec

D, N_GROUP = 128, 2                         # head size, key heads; as many value heads
ORIGINAL: Callable[[str, list[int]], np.ndarray] = spec.weights


def weights(name: str, shape: list[int]) -> np.ndarray:
    """attn_qkv and attn_gate hold the rows of ssm_in."""
    layer, _, rest = name.rpartition(".attn_")
    if rest not in ("qkv.weight", "gate.weight"):
        return ORIGINAL(name, shape)
    groups = ORIGINAL(layer + ".ssm_in.weight", [shape[0], 4 * D * N_GROUP]).reshape(N_GROUP, 4, D, shape[0])
    parts = groups[:, :3] if rest.startswith("qkv") else groups[:, 3:]
    return np.concatenate(parts.swapaxes(0, 1).reshape(-1, *parts.shape[2:]))


def logits(path: Path) -> np.ndarray:
    with ggraph.Model(path) as model, ggraph.Context(model, n_ctx=256, n_threads=1) as ctx:
        batch = ggraph.Batch()
        for t in range(20):
            batch.add(t, None, 0, output=True)
        ctx.process("decode", batch)
        found: np.ndarray = ctx.logits.copy()
        return found


def test_one_matrix_or_two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(spec, "weights", weights)
    rows = []
    for i, old in enumerate((False, True)):
        s = dict(spec.specs()["qwen3next-moe"])
        dropped = ("attn_qkv.", "attn_gate.") if old else ("ssm_in.",)
        s["tensors"] = [t for t in s["tensors"] if not any(d in t[0] for d in dropped)]
        rows.append(logits(spec.write(s, tmp_path / f"{i}.gguf")))
    assert np.allclose(rows[0], rows[1], rtol=1e-4, atol=1e-4) and np.abs(rows[0]).max() > 1
