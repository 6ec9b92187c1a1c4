"""Plans by repetition: word by word what they are the long way, for layers of all kinds."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggraph import Adapter, Batch, Context, Model
from ggraph.hook import Hook
from ggraph.schedule import repeat
from ggraph.schedule.plan import Plan
from tests import adapters, spec
from tests.tall import tall

# dense; windows and layers without; experts, behind a dense layer; latent attention; states; both; sequences of layers of two kinds
NAMES = ["llama-dense", "gemma3-dense", "gpt-oss-moe", "qwen3moe-moe", "deepseek2-moe", "mamba2-dense", "falcon-h1-dense",
         "qwen35-dense", "granitehybrid-dense", "lfm2moe-moe"]


@pytest.fixture(params=NAMES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return spec.write(tall(spec.specs()[request.param], 14), tmp_path / "m.gguf")


def both(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> tuple[Plan, Plan]:
    """By repetition, and the long way."""
    short = ctx.plan(ctx.graph())
    with monkeypatch.context() as patch:
        patch.setattr(repeat, "LEAST", 1000)
        return short, ctx.plan(ctx.graph())


def folded(plan: Plan) -> bool:
    return any(c.unrolled is not None for c in plan.compiled)       # type: ignore[attr-defined]


def words(plan: Plan) -> list[Any]:
    """The steps' table and all their parameter blocks, with addresses of the plan's own memory counted from its start."""
    c: Any = plan.compiled[0]
    table, numbers = c.table.copy(), c.sizes.numbers.copy()
    table[:, 1] -= c.sizes.numbers.ctypes.data
    own = (numbers >= c.scratch.address) & (numbers <= c.scratch.address + c.scratch.nbytes)
    numbers[own] -= c.scratch.address
    return [table.tolist(), numbers.tolist(), [[n.name for n in step.nodes] for step in c.steps]]


def values(**more: int) -> dict[str, int]:
    sizes = {f"{name}{i}": n for i in range(2) for name, n in (("n_kv", 32), ("n_cells", 17), ("stream", 0))}
    return sizes | {"n_tokens": 6, "n_seqs": 2, "n_seq_tokens": 3, "n_outputs": 2, "n_pooled": 1} | more


@pytest.mark.parametrize("options", [{}, {"kv_unified": False, "type_k": "q8_0"}, {"flash_attn": "off"}], ids=str)
def test_equal_to_the_long_way(path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with Model(path) as model, Context(model, n_ctx=64, n_ubatch=32, n_seq_max=2, **options) as ctx:
        short, long = both(ctx, monkeypatch)
        assert not folded(long) and (folded(short) or short.compiled[0].fallback)       # type: ignore[attr-defined]
        assert words(short) == words(long)
        for sizes in (values(), values(n_tokens=1, n_outputs=1, n_cells0=40)):
            short.resize(sizes)
            long.resize(sizes)
            assert words(short) == words(long)
        assert places(short) == places(long)


def places(plan: Plan) -> list[tuple[str, int]]:
    return [(n.name, int(n.root.offset)) for n in plan.splits[0].nodes]


def test_same_logits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for least in (3, 1000):
        monkeypatch.setattr(repeat, "LEAST", least)
        with Model(path) as model, Context(model, n_ctx=64, n_ubatch=4) as ctx:
            assert folded(next(iter(ctx.plans.plans.values()))) == (least == 3)
            batch = Batch()
            for token in (3, 1, 4, 1, 5, 9):
                batch.add(token, None, 0, output=True)
            ctx.process("decode", batch)
            found.append(ctx.logits.copy())
    np.testing.assert_array_equal(*found)


def test_a_lora_of_some_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers repeat; those without it do not count among them. A copy of a layer reads its own layer's pair."""
    s = tall(spec.specs()["llama-dense"], 16)
    shape = next(ne for name, ne, _ in s["tensors"] if name == "blk.9.attn_q.weight")
    pairs = {name: adapters.pair(name, shape, 4) for il in range(4, 16) if (name := f"blk.{il}.attn_q.weight")}
    lora = Adapter(adapters.write_lora(tmp_path / "l.gguf", "llama", pairs, 8.0))
    with Model(spec.write(s, tmp_path / "m.gguf")) as model, Context(model, n_ctx=64, adapters=[(lora, 0.5)]) as ctx:
        short, long = both(ctx, monkeypatch)
        assert folded(short) and words(short) == words(long)
        unrolled: Any = short.compiled[0].unrolled              # type: ignore[attr-defined]
    assert all(set(lora.leaves) & set(leaves) for leaves in unrolled.repeat.leaves) and len(unrolled.more) >= 2


def test_a_hook_sees_every_layer(tmp_path: Path) -> None:
    """A plan that is cut goes the long way."""
    seen: list[str] = []
    path = spec.write(tall(spec.specs()["llama-dense"], 12), tmp_path / "m.gguf")
    with Model(path) as model, Context(model, n_ctx=64, on_node=Hook("l_out-*", lambda name, x, node: seen.append(name))) as ctx:
        batch = Batch()
        batch.add(1, 0, 0, output=True)
        ctx.process("decode", batch)
    assert seen == [f"l_out-{il}" for il in range(12)]


def test_another_layer_ends_the_run(tmp_path: Path) -> None:
    """Layer 9 has a bias less."""
    s = tall(spec.specs()["llama-dense"], 14)
    s["tensors"].remove(next(t for t in s["tensors"] if t[0] == "blk.9.attn_q.bias"))
    with Model(spec.write(s, tmp_path / "m.gguf")) as model, Context(model, n_ctx=64) as ctx:
        plan = ctx.plan(ctx.graph())
        alike = [section.described for section in repeat.sections(plan.splits[0].nodes)]
        unrolled: Any = plan.compiled[0].unrolled               # type: ignore[attr-defined]
    assert alike[8] == alike[2] and alike[9] not in (*alike[:9], *alike[10:])
    assert [int(leaves[0].name.split(".")[1]) for leaves in unrolled.repeat.leaves] == [2, 3, 4, 5, 6, 7, 8]
