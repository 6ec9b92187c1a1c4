"""LoRAs and control vectors: the same logits as a model with the change merged into its weights, and as llama.cpp's."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggraph
from ggraph.errors import Error, ModelError
from tests import adapters, spec
from tests.test_architectures import nmse
from tests.test_context import EXACT

Adapters = Sequence[tuple[ggraph.Adapter, float]]
MERGED = ("llama-dense", "llama-moe-b", "gemma3-dense-b", "deepseek2-moe-b", "qwen35-dense-b", "granitehybrid-dense-b")
GOLDEN = np.load(spec.FOLDER / "adapters.npz")


def feed(ctx: ggraph.Context, rows: Sequence[tuple[int, int, int]]) -> np.ndarray:
    batch = ggraph.Batch()
    for token, pos, seq in rows:
        batch.add(token, pos, seq, output=True)
    ctx.process("decode", batch)
    return np.array(ctx.logits)


def context(model: ggraph.Model, **options: Any) -> ggraph.Context:
    return ggraph.Context(model, n_ctx=256, n_ubatch=64, n_threads=2, **{"flash_attn": "off", **options})


def logits(path: Path, using: Adapters = (), **options: Any) -> np.ndarray:
    with ggraph.Model(path) as model, context(model, adapters=using, **options) as ctx:
        return feed(ctx, adapters.batch())


@pytest.mark.parametrize("name", MERGED)
def test_a_lora_equals_merged_weights(name: str, tmp_path: Path) -> None:
    files = adapters.write(tmp_path, name)
    first, second = (ggraph.Adapter(path) for path in files.loras)
    plain = logits(files.model)
    with ggraph.Model(files.model) as model, context(model) as ctx:
        for scales in ((0.25, 0.0), (0.25, -0.4), (0.0, 0.3)):
            ctx.memory.clear()
            ctx.set_adapters([(first, scales[0]), (second, scales[1])])
            got = feed(ctx, adapters.batch())
            merged = spec.write(spec.specs()[name], tmp_path / "merged.gguf", deltas=adapters.deltas(name, scales))
            want = logits(merged)
            assert nmse(got, want) <= 1e-5
            assert nmse(plain, want) > 1e-3
        ctx.set_adapters([])
        ctx.memory.clear()
        assert np.array_equal(feed(ctx, adapters.batch()), plain)


@pytest.mark.parametrize("case", adapters.CASES)
@pytest.mark.parametrize("name", adapters.NAMES)
def test_golden(name: str, case: str, tmp_path: Path) -> None:
    files, (scales, strength) = adapters.write(tmp_path, name), adapters.CASES[case]
    using = [(ggraph.Adapter(path), scale) for path, scale in zip(files.loras, scales)]
    if strength:
        path = adapters.write_vector(tmp_path / "v.gguf", dict(enumerate(adapters.directions(name), 1)))
        using.append((ggraph.Adapter(path, layer_range=adapters.LAYERS), strength))
    assert nmse(logits(files.model, using), GOLDEN[f"{name}/{case}"]) <= 1e-5


def test_a_scale_is_an_input_and_changes_between_batches(tmp_path: Path) -> None:
    files = adapters.write(tmp_path, "llama-dense")
    lora = ggraph.Adapter(files.loras[0])
    rows = adapters.batch()
    with ggraph.Model(files.model) as model, context(model, adapters=[(lora, 1.0)]) as ctx:
        feed(ctx, rows[:6])
        built = ctx.perf.plans["built"]
        ctx.set_adapters([(lora, -0.5)])
        got = feed(ctx, rows[6:])
        assert ctx.perf.plans["built"] == built
        ctx.set_adapters([])
        ctx.memory.clear()
        feed(ctx, rows[:6])
        ctx.set_adapters([(lora, -0.5)])
        assert nmse(feed(ctx, rows[6:]), got) > 1e-6        # the first half was computed with it


def test_a_control_vector_is_added_behind_its_layers(tmp_path: Path) -> None:
    path = spec.write(spec.specs()["llama-dense-b"], tmp_path / "m.gguf")
    rows = dict(enumerate(adapters.directions("llama-dense-b"), 1))
    vector = ggraph.Adapter(adapters.write_vector(tmp_path / "v.gguf", rows), layer_range=(2, 2))
    assert vector.kind == "control_vector" and list(vector.directions) == [2]

    def add(name: str, x: np.ndarray, node: object) -> Any:
        return x + np.float32(0.7) * rows[2]
    want = logits(path, on_node=ggraph.Hook("l_out-2", add))
    got = logits(path, [(vector, 0.7)])
    assert nmse(got, want) <= 1e-9 and nmse(got, logits(path)) > 1e-3


def test_logits_do_not_depend_on_ubatches_or_company(tmp_path: Path) -> None:
    files = adapters.write(tmp_path, "llama-dense-b")
    using = [(ggraph.Adapter(p), 0.3) for p in files.loras]
    rows = adapters.batch()
    with ggraph.Model(files.model) as model:
        with context(model, adapters=using, flash_attn="on") as ctx:
            alone = feed(ctx, rows)
        with context(model, adapters=using, flash_attn="on", n_seq_max=2) as ctx:
            both = feed(ctx, [(t, p, s) for t, p, _ in rows for s in (0, 1)])[::2]
        with context(model, adapters=using, flash_attn="on") as ctx:
            split = np.concatenate([feed(ctx, rows[:5]), *(feed(ctx, [row]) for row in rows[5:])])
    assert all(np.array_equal(x, alone) if EXACT else nmse(x, alone) < 1e-7 for x in (both, split))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"arch": "gemma3"}, "made for architecture 'gemma3', the model has 'llama'"),
    ({"base": "blk.9.attn_q.weight"}, "changes 'blk.9.attn_q.weight', which the model does not have"),
    ({"a": (4, 32)}, r"changes 'blk.0.attn_q.weight' as \[32, 256\]; in the model it has"),
    ({"a": (5, 256)}, "of different ranks"),
    ({"adapter.type": "other"}, "is neither a LoRA"),
    ({"base": "blk.0.attn_norm.weight", "a": (4, 256), "b": (1, 4)}, "'blk.0.attn_norm.weight', which cannot be changed"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_what_does_not_fit_is_refused_and_changes_nothing(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    files = adapters.write(tmp_path, "llama-dense")
    n_embd, n_out = adapters.targets("llama-dense")["blk.0.attn_q.weight"]
    shapes = change.get("a", (4, n_embd)), change.get("b", (n_out, 4))
    a, b = (np.ones(shape, np.float32) for shape in shapes)
    kv = {key: value for key, value in change.items() if "." in key}
    path = adapters.write_lora(tmp_path / "l.gguf", change.get("arch", "llama"),
                               {change.get("base", "blk.0.attn_q.weight"): (a, b)}, 1.0, **kv)
    good = ggraph.Adapter(files.loras[0])
    with ggraph.Model(files.model) as model, context(model, adapters=[(good, 1.0)]) as ctx:
        before = feed(ctx, adapters.batch())
        with pytest.raises(Error, match=message):
            ctx.set_adapters([(ggraph.Adapter(path), 1.0)])
        ctx.memory.clear()
        assert np.array_equal(feed(ctx, adapters.batch()), before)


def test_files_that_are_no_adapters(tmp_path: Path) -> None:
    files = adapters.write(tmp_path, "llama-dense")
    with pytest.raises(ModelError, match="neither a LoRA"):
        ggraph.Adapter(files.model)
    with pytest.raises(ModelError, match="a layer range is for control vectors"):
        ggraph.Adapter(files.loras[0], layer_range=(1, 2))
    with pytest.raises(ModelError, match="no direction for layers 7 to 9"):
        ggraph.Adapter(adapters.write_vector(tmp_path / "v.gguf", {1: np.ones(8, np.float32)}), layer_range=(7, 9))
    with pytest.raises(ModelError, match="which is no direction of a layer"):
        ggraph.Adapter(adapters.write_vector(tmp_path / "w.gguf", {0: np.ones(8, np.float32)}))
    vector = ggraph.Adapter(adapters.write_vector(tmp_path / "x.gguf", {1: np.ones(8, np.float32)}))
    with ggraph.Model(files.model) as model, pytest.raises(ModelError, match="a direction of 8 values"):
        context(model, adapters=[(vector, 1.0)])
