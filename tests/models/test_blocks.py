"""Models that choose blocks to attend to: against llama.cpp, and whatever else is in the cache."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggraph
from ggraph.errors import Error, ModelError
from tests import blocks, spec
from tests.blocks import CASES, Rows
from tests.test_architectures import nmse

GOLDEN = np.load(spec.FOLDER / "blocks.npz")
OPTIONS: dict[str, Any] = {"n_ctx": 512, "n_batch": 512, "n_ubatch": 64, "type_k": "f32", "type_v": "f32", "n_threads": 2}


def feed(ctx: ggraph.Context, rows: Rows) -> np.ndarray:
    batch = ggraph.Batch()
    for token, pos, seq in rows:
        batch.add(token, pos, seq, output=True)
    ctx.process("decode", batch)
    return np.array(ctx.logits)


def logits(name: str, folder: Path, **options: Any) -> np.ndarray:
    """Of the golden's rows."""
    case, n_seq = CASES[name], len(CASES[name].lengths)
    with ggraph.Model(blocks.write(name, folder)) as model, ggraph.Context(
            model, **OPTIONS | {"n_ctx": blocks.n_ctx(case), "n_ubatch": case.n_ubatch, "n_seq_max": n_seq} | options) as ctx:
        return np.concatenate([feed(ctx, rows) for rows in blocks.batches(case)])[blocks.picked(case)]


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, unified: bool, tmp_path: Path) -> None:
    """Also with one pool of cells for all sequences, in which llama.cpp attends to all blocks."""
    got, everything = logits(name, tmp_path, kv_unified=unified), GOLDEN[f"{name}/all"]
    assert nmse(got, GOLDEN[f"{name}/chosen"]) <= 1e-5
    assert nmse(got[:len(everything)], everything) > 1e-3


def test_without_flash_attention_all_blocks_are_seen(tmp_path: Path) -> None:
    """As in llama.cpp."""
    want = GOLDEN["blocks_of_4/all"]
    assert nmse(logits("blocks_of_4", tmp_path, flash_attn="off")[:len(want)], want) <= 1e-5


def ids(seq: int, n: int) -> Rows:
    """The first n tokens of a text of its own."""
    return [(t, i, seq) for i, t in enumerate(spec.tokens()[40 * seq:40 * seq + n])]


@pytest.mark.parametrize("name", ["blocks_of_4", "means_of_4"])
def test_sequences_that_part_and_come_back(name: str, tmp_path: Path) -> None:
    """Whatever was removed, shared, saved and loaded: the next tokens are those of a fresh context."""
    with ggraph.Model(blocks.write(name, tmp_path)) as model:
        with ggraph.Context(model, **OPTIONS) as ctx:
            want = feed(ctx, ids(0, 30))
        with ggraph.Context(model, **OPTIONS, n_seq_max=3, n_rollback=4) as ctx:
            feed(ctx, ids(1, 20))
            feed(ctx, [*ids(0, 17), *((t, 20 + i, 1) for i, (t, _, _) in enumerate(ids(0, 9)))])
            feed(ctx, [(7, 17 + i, 0) for i in range(4)])                       # other tokens, which are taken back
            assert ctx.memory.seq_rm(0, 17, -1) and ctx.memory.seq_cp(0, 2)
            saved = ctx.state_get(2)
            ctx.memory.seq_rm(2)
            ctx.memory.seq_rm(1)
            ctx.state_set(saved, 2)
            for seq in (0, 2):
                got = feed(ctx, [(t, p, seq) for t, p, _ in ids(0, 30)[17:]])
                assert nmse(got, want[17:]) <= 1e-9


def test_keys_of_the_choice_follow_moved_positions(tmp_path: Path) -> None:
    with ggraph.Model(blocks.write("blocks_of_4", tmp_path)) as model:
        with ggraph.Context(model, **OPTIONS) as ctx:
            want = feed(ctx, ids(0, 40))
        with ggraph.Context(model, **OPTIONS) as ctx:
            feed(ctx, [(t, p + 8, s) for t, p, s in ids(0, 30)])
            assert ctx.memory.seq_add(0, 0, -1, -8)
            assert nmse(feed(ctx, ids(0, 40)[30:]), want[30:]) <= 1e-7


def test_positions_without_a_cell(tmp_path: Path) -> None:
    """A gap in the middle: its blocks have no keys, or fewer. No position is past the last block of the context."""
    with ggraph.Model(blocks.write("blocks_of_4", tmp_path)) as model, ggraph.Context(model, **OPTIONS) as ctx:
        feed(ctx, ids(0, 30))
        assert ctx.memory.seq_rm(0, 6, 19)
        assert np.isfinite(feed(ctx, ids(0, 40)[30:])).all()
        assert ctx.memory.seq_add(0, 0, -1, 500)
        with pytest.raises(Error, match="reaches past position 511"):
            feed(ctx, [(1, 540, 0)])
        assert ctx.memory.seq_pos_max(0) == 539


def test_a_choice_needs_a_query_for_each_kv_head(tmp_path: Path) -> None:
    overrides = {"minimax-m3.attention.head_count_kv": 1}
    s = blocks.case_spec(CASES["blocks_of_4"])
    sizes = {"attn_k.weight": [256, 128], "attn_v.weight": [256, 128], "attn_k.bias": [128], "attn_v.bias": [128]}
    s["tensors"] = [[t, sizes.get(t.split(".", 2)[-1], shape), kind] for t, shape, kind in s["tensors"]]
    with ggraph.Model(spec.write(s, tmp_path / "m.gguf"), kv_overrides=overrides) as model:
        with pytest.raises(ModelError, match="head_count is 2; blocks are chosen for each of 1 KV heads"):
            ggraph.Context(model, **OPTIONS)
        ggraph.Context(model, **OPTIONS, flash_attn="off").close()


@pytest.mark.parametrize(("ratios", "top_k", "said"), [([2, 4], 8, "cannot be chosen in blocks of .2, 4.; all layers"),
                                                       ([0, 9], 8, "8 tokens cannot be chosen in blocks of .0, 9.")])
def test_blocks_of_means_have_one_size(ratios: list[int], top_k: int, said: str, tmp_path: Path) -> None:
    path = spec.write(spec.specs()["qwen4exp-moe"], tmp_path / "m.gguf")
    overrides = {"qwen4exp.attention.compress_ratios": ratios, "qwen4exp.attention.indexer.top_k": top_k,
                 "qwen4exp.attention.recurrent_layers": [0, 0]}
    with pytest.raises(ModelError, match=said):
        ggraph.Model(path, kv_overrides=overrides)
