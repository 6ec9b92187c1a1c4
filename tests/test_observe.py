"""Context(on_step=): what an observer is told is what the step was, and being looked at changes nothing."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ggraph
from tests import spec, tiny


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("observe") / "m.gguf")


def batch(n: int, pos: int = 0, seq: int = 0) -> ggraph.Batch:
    made = ggraph.Batch()
    for i in range(n):
        made.add(5 + i, pos + i, seq, output=i == n - 1)
    return made


def test_each_ubatch_is_told_with_its_plan(path: Path) -> None:
    seen: list[ggraph.Observed] = []
    with ggraph.Model(path) as model, ggraph.Context(model, n_ctx=256, n_ubatch=4, on_step=seen.append) as ctx:
        ctx.process("decode", batch(6))
        ctx.process("decode", batch(1, 6))
        ctx.process("decode", batch(1, 7))
        assert [s.step.ubatch.n_tokens for s in seen] == [4, 2, 1, 1]
        assert [s.values["n_tokens"] for s in seen] == [4, 2, 1, 1]
        assert seen[0].how == "resized" and seen[3].how == "resized"       # the first plan is made when the Context opens
        assert len({s.key for s in seen}) == 1 and all(s.times and s.seconds > 0 for s in seen)
        ctx.on_step = None
        ctx.process("decode", batch(1, 8))
        assert len(seen) == 4


def test_shapes_are_those_of_this_step(path: Path) -> None:
    found: list[dict[str, tuple[int, ...]]] = []

    def look(seen: ggraph.Observed) -> None:
        found.append({t.name: shape.ne for t, shape in seen.shapes.items() if t.name})
        given = seen.inputs()
        assert given["kq_mask_0"].shape == (1, 1, seen.values["n_tokens"], 256)
        visible = (given["kq_mask_0"][0, 0] == 0).sum(1)
        assert visible.tolist() == (seen.step.ubatch.pos[0] + 1).tolist()

    with ggraph.Model(path) as model, ggraph.Context(model, n_ctx=512, on_step=look) as ctx:
        ctx.process("decode", batch(6))
        ctx.process("decode", batch(1, 6))
    assert [f["inp_embd"] for f in found] == [(64, 6, 1, 1), (64, 1, 1, 1)]
    assert [f["cache_k_l0"] for f in found] == [(32, 512, 1, 1)] * 2
    assert [f["cache_k_l0 (view)"] for f in found] == [(32, 1, 256, 1)] * 2
    assert [f["result_output"] for f in found] == [(tiny.N_VOCAB, 1, 1, 1)] * 2


def test_traffic_counts_what_is_touched(path: Path) -> None:
    seen: list[ggraph.Observed] = []
    with ggraph.Model(path) as model, ggraph.Context(model, n_ctx=256, on_step=seen.append) as ctx:
        ctx.process("decode", batch(3))
        last = seen[0]
        by_name = {n.name: n for n in last.plan.graph.nodes if n.name and n.view_src is None}
        assert last.traffic([by_name["inp_embd"]]) == 2 * 3 * 64 * 4 + 3 * 4         # three rows read and written, three ids
        head = by_name["result_output"]
        assert last.traffic([head]) == head.src[0].nbytes + 64 * 4 + tiny.N_VOCAB * 4
        attention = next(n for n in last.plan.graph.nodes if n.op == "flash_attn_ext")
        assert last.traffic([attention]) < 256 * 32 * 2, "cells that nobody listed are not read"


def test_results_are_the_same_and_an_error_takes_the_step_back(path: Path) -> None:
    def refuse(seen: ggraph.Observed) -> None:
        raise ValueError("not this one")

    with ggraph.Model(path) as model, ggraph.Context(model, n_ctx=256) as ctx:
        ctx.process("decode", batch(6))
        plain = ctx.logits.copy()
        ctx.memory.clear()
        ctx.on_step = refuse
        with pytest.raises(ValueError, match="not this one"):
            ctx.process("decode", batch(6))
        assert ctx.memory.seq_pos_max(0) == -1
        ctx.on_step = lambda seen: None
        ctx.process("decode", batch(6))
        assert np.array_equal(ctx.logits, plain)


@pytest.mark.parametrize("name", ["llama-dense-b"])
def test_other_files_too(name: str, tmp_path: Path) -> None:
    seen: list[ggraph.Observed] = []
    path = spec.write(spec.specs()[name], tmp_path / "m.gguf")
    with ggraph.Model(path) as model, ggraph.Context(model, n_ctx=256, flash_attn="off", on_step=seen.append) as ctx:
        ctx.process("decode", batch(2))
        for nodes, _ in seen[0].times:
            assert seen[0].traffic(nodes) >= 0 and all(n in seen[0].shapes for n in nodes)
