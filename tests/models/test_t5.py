"""An encoder and a decoder beside llama.cpp's: tests/golden/models/t5.npz, made by bench/make_goldens.py."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

import ggraph
from tests import spec, t5

GOLDEN = np.load(spec.FOLDER / "t5.npz")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ggraph.Model]:
    folder = tmp_path_factory.mktemp("t5")
    return {name: ggraph.Model(spec.write(what, folder / f"{name}.gguf")) for name, what in t5.SPECS.items()}


def run(ctx: ggraph.Context, kind: str, rows: Iterable[tuple[int, int, int]]) -> Any:
    batch = ggraph.Batch()
    for token, _, seq in rows:
        batch.add(token, None, seq, output=True)
    ctx.process(kind, batch)
    return np.array(ctx.embeddings if kind == "encode" else ctx.logits)


def nmse(got: np.ndarray, want: np.ndarray) -> float:
    return float(((got - want) ** 2).sum() / (want ** 2).sum())


@pytest.mark.parametrize("flash_attn", ["off", "on"])
@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("name", t5.SPECS)
def test_its_logits_are_those_of_llama_cpp(models: dict[str, ggraph.Model], name: str, unified: bool, flash_attn: str) -> None:
    with ggraph.Context(models[name], n_ctx=t5.N_CTX, n_seq_max=2, kv_unified=unified, flash_attn=flash_attn) as ctx:
        run(ctx, "encode", t5.text())
        got = np.concatenate([run(ctx, "decode", rows) for rows in t5.batches()])
    assert nmse(got, GOLDEN[name]) < 1e-5


@pytest.mark.parametrize("name", t5.SPECS)
def test_a_sequence_alone_gives_what_it_gives_in_company(models: dict[str, ggraph.Model], name: str) -> None:
    lone = []
    for s in range(2):
        with ggraph.Context(models[name], n_ctx=t5.N_CTX, n_ubatch=3) as ctx:
            run(ctx, "encode", [(t, p, 0) for t, p, seq in t5.text() if seq == s])
            lone += [run(ctx, "decode", [(t, p, 0) for t, p, seq in rows if seq == s]) for rows in t5.batches()]
    with ggraph.Context(models[name], n_ctx=t5.N_CTX, n_seq_max=2) as ctx:
        run(ctx, "encode", t5.text())
        both = [run(ctx, "decode", rows) for rows in t5.batches()]
    for i, rows in enumerate(both):
        assert nmse(rows, np.concatenate([lone[i], lone[i + len(both)]])) < 1e-9
