"""Any bytes in a file, any metadata: a model loads and runs, or says what is wrong; no other error, no flood of memory."""
from __future__ import annotations

import math
import random
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ggraph
from ggraph import Batch, Context, Model, dtypes
from ggraph.errors import ModelError
from tests import spec, tiny

WORDS = [b"\xff\xff\xff\x7f", b"\0\0\0\0", b"\xff\xff\xff\xff", b"\0\0\x80\x7f", b"\0\0\xc0\x7f", b"\xff" * 8, bytes(8),
         (1 << 63).to_bytes(8, "little"), (1 << 31).to_bytes(8, "little"), (10**6).to_bytes(8, "little")]
VALUES = [0, -1, 1, 3, 10**6, 2**31 - 1, 2**31, 2**63, math.nan, math.inf, 0.0, -1.5, 1e30, True, "x", "", [], [1], [0] * 50]
KEYS = ["attention.sliding_window", "rope.scaling.factor", "rope.scaling.type", "rope.scaling.attn_factor", "rope.freq_base",
        "rope.scaling.original_context_length", "rope.dimension_sections", "expert_count", "expert_used_count",
        "expert_gating_func", "attention.head_count_kv", "attention.scale",
        "attention.max_alibi_bias", "attention.causal", "attention.clamp_kqv",
        "vocab_size", "pooling_type", "nextn_predict_layers", "ssm.conv_kernel", "full_attention_interval", "logit_scale",
        "classifier.output_labels"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("damaged")
    return {"tiny": tiny.write(folder / "tiny.gguf"), "hybrid": tiny.write_hybrid(folder / "hybrid.gguf"),
            "scratch": folder / "scratch.gguf"}


def use(path: Path, **overrides: Any) -> bool:
    """All that reads the file's metadata; whether it was sound enough for that."""
    tracemalloc.start()
    try:
        with Model(path, backend="ref", kv_overrides=overrides) as model:
            model.vocab.decode(model.vocab.encode("the rain"))
            if model.chat_template:
                model.chat_template.render([{"role": "user", "content": "a"}])
            ggraph.memory_needed(model, n_ctx=256)
            with Context(model, n_ctx=256, n_ubatch=8) as ctx:
                batch = Batch()
                batch.add(1, 0, 0, output=True)
                ctx.process("decode", batch)
        return True
    except ggraph.Error:
        return False
    finally:
        assert tracemalloc.get_traced_memory()[1] < 256 << 20
        tracemalloc.stop()


def damaged(source: Path, scratch: Path, seed: int) -> Path:
    """A copy with a few other bytes in the header, most of them where keys, their values and tensors are."""
    rng, content = random.Random(seed), bytearray(source.read_bytes())
    with Model(source) as model:
        end = min(t.offset for t in model.file.tensors.values())
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        at = rng.choice([rng.randrange(end), rng.randrange(1200), rng.randrange(end - 3000, end)])
        new = rng.choice([bytes([rng.randrange(256)]), bytes([content[at] ^ 1 << rng.randrange(8)]), rng.choice(WORDS)])
        content[at:at + len(new)] = new
    scratch.write_bytes(content)
    return scratch


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["tiny", "hybrid"]), st.integers(0, 2**32))
def test_other_bytes_in_the_header(files: dict[str, Path], name: str, seed: int) -> None:
    use(damaged(files[name], files["scratch"], seed))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["tiny", "hybrid"]), st.integers(0, 10**6), st.sampled_from(VALUES))
def test_other_values_of_keys(files: dict[str, Path], name: str, i: int, value: Any) -> None:
    keys = every_key(files[name])
    use(files[name], **{keys[i % len(keys)]: value})


def every_key(path: Path) -> list[str]:
    with Model(path) as model:
        return [*model.kv, *(f"{model.hparams.arch}.{key}" for key in KEYS)]


@pytest.mark.slow
def test_other_bytes_in_the_header_at_length(files: dict[str, Path]) -> None:
    sound = [use(damaged(files[name], files["scratch"], seed)) for seed in range(3000) for name in ("tiny", "hybrid")]
    assert 0.05 < sum(sound) / len(sound) < 0.95


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "hybrid"])
def test_every_key_with_every_value(files: dict[str, Path], name: str) -> None:
    sound = [use(files[name], **{key: value}) for key in every_key(files[name]) for value in VALUES]
    assert 0.05 < sum(sound) / len(sound) < 0.95


def test_rotation_of_nothing_is_told(files: dict[str, Path]) -> None:
    for key, value in (("rope.dimension_count", 0), ("rope.dimension_sections", ""), ("rope.dimension_sections", [1] * 5)):
        with Model(files["hybrid"]) as model:
            key = f"{model.hparams.arch}.{key}"
        with pytest.raises(ggraph.ModelError), Model(files["hybrid"], backend="ref", kv_overrides={key: value}) as model:
            Context(model, n_ctx=256)


@pytest.mark.parametrize("kind", ["I8", "I16", "I32", "I64", "F64"])
@pytest.mark.parametrize("name", ["token_embd.weight", "blk.0.attn_q.weight", "blk.0.ffn_norm.weight"])
def test_weights_of_types_that_are_none(tmp_path: Path, name: str, kind: str) -> None:
    s = tiny.tiny()
    w = gguf.GGUFWriter(tmp_path / "m.gguf", s["arch"])
    for key, what, value in s["kv"]:
        what, _, inner = what.partition(":")
        w.add_key_value(key, value, spec.VALUE[what], sub_type=spec.VALUE[inner] if inner else None)
    for n, shape, _ in s["tensors"]:
        w.add_tensor(n, spec.weights(n, shape).astype(dtypes.TYPES[kind].np if n == name else np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    with pytest.raises(ModelError, match=f"tensor '{name}' is of type {kind}; weights are of"):
        Model(tmp_path / "m.gguf")
