"""The block for next-token prediction against llama.cpp, and what a file must have for it."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ggraph
from ggraph.batch import Ubatch
from ggraph.errors import BatchError, ModelError
from tests import nextn, spec
from tests.test_architectures import nmse

GOLDEN = np.load(spec.FOLDER / "nextn.npz")


@pytest.mark.parametrize("n_ubatch", [64, 7])
@pytest.mark.parametrize("name", nextn.NAMES)
def test_golden(name: str, n_ubatch: int, tmp_path: Path) -> None:
    text, seen = spec.tokens(), list[np.ndarray]()

    def keep(u: Ubatch, hidden: np.ndarray) -> None:
        seen.append(hidden.copy())
    with ggraph.Model(nextn.write(name, tmp_path / "m.gguf")) as model, \
            ggraph.Context(model, n_ctx=256, n_ubatch=n_ubatch, flash_attn="off") as ctx, \
            ggraph.Context(model, n_ctx=256, n_ubatch=n_ubatch, flash_attn="off", mtp=True) as block:
        ctx.follow(keep)
        batch = ggraph.Batch()
        for token in text[:nextn.N_PROMPT]:
            batch.add(token, None, 0)
        ctx.process("decode", batch)
        hidden = seen.pop()
        assert nmse(hidden, GOLDEN[f"{name}/hidden"]) <= 1e-5
        batch = ggraph.Batch()
        for token, h in zip(text, [np.zeros_like(hidden[0]), *hidden[:-1]]):
            batch.add(token, None, 0, output=True, embd=h)
        block.process("decode", batch)
        logits, state = [block.logits.copy()], hidden[-1]
        for i in range(nextn.N_DRAFT):
            batch = ggraph.Batch()
            batch.add(text[nextn.N_PROMPT + i], None, 0, output=True, embd=state)
            block.process("decode", batch)
            logits.append(block.logits.copy())
            state = block.hidden[-1].copy()
        assert nmse(np.concatenate(logits), GOLDEN[f"{name}/logits"]) <= 1e-5


def test_what_has_no_block_says_so(tmp_path: Path) -> None:
    with ggraph.Model(spec.write(spec.specs()["qwen35-dense"], tmp_path / "m.gguf")) as model, \
            pytest.raises(ModelError, match="m.gguf holds no block for next-token prediction"):
        ggraph.Context(model, mtp=True)
    s = nextn.nextn_spec("qwen35-dense")
    without = {**s, "tensors": [t for t in s["tensors"] if not t[0].endswith("hnorm.weight")]}
    with ggraph.Model(spec.write(without, tmp_path / "w.gguf")) as model:
        for _ in range(2):
            with pytest.raises(ModelError, match="nextn.hnorm.weight' is not in w.gguf"):
                ggraph.Context(model, mtp=True)


def test_its_batches_have_both(tmp_path: Path) -> None:
    plain, both = ggraph.Batch(), ggraph.Batch()
    plain.add(1, 0, 0)
    with ggraph.Model(nextn.write("qwen35-dense", tmp_path / "m.gguf")) as model, ggraph.Context(model, n_ctx=256) as ctx, \
            ggraph.Context(model, n_ctx=256, mtp=True) as block:
        both.add(1, 0, 0, embd=np.zeros(model.hparams.n_embd, np.float32))
        for context, batch in ((ctx, both), (block, plain)):
            with pytest.raises(BatchError, match="a context for next-token prediction, and no other"):
                context.process("decode", batch)
    with pytest.raises(BatchError, match="not both"):
        plain.add(1, 1, 0, embd=np.zeros(8, np.float32))
