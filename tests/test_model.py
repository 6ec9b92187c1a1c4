"""Opening models: what is refused, in which words; weights that are placed once; known names."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ggraph
from ggraph.model import known_architectures
from ggraph.models import UNSUPPORTED
from tests import spec

Spec = dict[str, Any]


def changed(**kv: Any) -> Spec:
    """The tiny llama with other values of keys (`.` written `__`); None takes a key away."""
    s = dict(spec.specs()["llama-dense-b"])
    new = {k.replace("__", "."): v for k, v in kv.items()}
    s["kv"] = [[k, t, new.get(k.split(".", 1)[1], v)] for k, t, v in s["kv"] if new.get(k.split(".", 1)[1], v) is not None]
    return s


def tensors(change: Callable[[list[Any]], list[Any]]) -> Spec:
    s = dict(spec.specs()["llama-dense-b"])
    s["tensors"] = change([list(t) for t in s["tensors"]])
    return s


REFUSED: dict[str, tuple[Spec, str]] = {
    "unknown architecture": (dict(spec.specs()["llama-dense-b"], arch="lama",
                                  kv=[[k.replace("llama.", "lama."), t, v] for k, t, v in spec.specs()["llama-dense-b"]["kv"]]),
                             "'lama' is not known.*llama"),
    "missing key": (changed(embedding_length=None), "lacks the key 'llama.embedding_length'"),
    "missing tensor": (tensors(lambda ts: [t for t in ts if t[0] != "blk.1.ffn_down.weight"]), "'blk.1.ffn_down.weight' is not in"),
    "extra tensor": (tensors(lambda ts: [*ts, ["blk.0.attn_mystery.weight", [8], "F32"]]), "attn_mystery"),
    "other shape": (tensors(lambda ts: [[n, [s[0], 2 * s[1]] if n == "blk.0.attn_k.weight" else s, t] for n, s, t in ts]),
                    "'blk.0.attn_k.weight' has shape.*expects"),
    "no layers": (changed(block_count=0), "block_count"),
    "no heads": (changed(attention__head_count=0, attention__head_count_kv=0), "."),
    "too many layers": (changed(block_count=9), "'blk.3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    made, words = REFUSED[name]
    with pytest.raises(ggraph.ModelError, match=words) as refused:
        ggraph.Model(spec.write(made, tmp_path / "m.gguf"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kv", [{"attention.head_count": 0}, {"attention.head_count": 3}, {"rope.dimension_count": 7},
                                {"attention.layer_norm_rms_epsilon": "x"}, {"block_count": -1}, {"attention.key_length": 10 ** 9},
                                {"context_length": -5}, {"expert_count": 3}, {"rope.scaling.factor": float("nan")}])
def test_hostile_metadata_gives_a_typed_error_or_a_model(kv: dict[str, Any], tmp_path: Path) -> None:
    path = spec.write(spec.specs()["llama-dense-b"], tmp_path / "m.gguf")
    try:
        with ggraph.Model(path, kv_overrides={f"llama.{k}": v for k, v in kv.items()}) as model:
            ggraph.Context(model, n_ctx=256).close()
    except ggraph.Error as e:
        assert len(str(e)) > 10


def test_overrides_replace_metadata(tmp_path: Path) -> None:
    path = spec.write(spec.specs()["llama-dense-b"], tmp_path / "m.gguf")
    with ggraph.Model(path, kv_overrides={"llama.context_length": 77}) as model:
        assert model.hparams.n_ctx_train == 77 and model.n_params == sum(t.n_elements for t in model.file.tensors.values())


def test_every_architecture_can_be_found_and_reads_top_to_bottom() -> None:
    from ggraph.model import find_architecture
    for name in known_architectures():
        module = find_architecture(name)
        order = [module.hparams.__code__.co_firstlineno, module.weights.__code__.co_firstlineno,
                 module.graph.__code__.co_firstlineno]
        local = [f for f in (module.hparams, module.weights, module.graph) if f.__module__ == vars(module)["__name__"]]
        assert len(local) < 3 or order == sorted(order), name


def test_weights_are_placed_once_and_freed(tmp_path: Path) -> None:
    path = spec.write(spec.specs()["llama-dense-b"], tmp_path / "m.gguf")
    model = ggraph.Model(path)
    with ggraph.Context(model, n_ctx=256) as a, ggraph.Context(model, n_ctx=256) as b:
        assert a.backends[0] is b.backends[0]
    model.close()
    assert not model.backends
    with pytest.raises(ggraph.ModelError, match="is closed; load it again"):
        ggraph.Context(model, n_ctx=256)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_file_of_a_missing_architecture_says_what_it_needs(name: str, tmp_path: Path) -> None:
    path = spec.write({**spec.specs()["llama-dense-b"], "arch": name}, tmp_path / "m.gguf")
    with pytest.raises(ggraph.ModelError, match=f"architecture '{name}' is not supported: it needs {UNSUPPORTED[name]}"):
        ggraph.Model(path)
    assert name not in known_architectures()


def test_overriding_the_architecture_takes_another_one_or_lists_them(tmp_path: Path) -> None:
    path = spec.write(spec.specs()["llama-dense-b"], tmp_path / "m.gguf")
    with pytest.raises(ggraph.ModelError, match=r"'lama' is not known; known ones: .*\bllama\b"):
        ggraph.Model(path, kv_overrides={"general.architecture": "lama"})


def test_an_n_ctx_that_does_not_fit_names_both_numbers(tmp_path: Path) -> None:
    with ggraph.Model(spec.write(spec.specs()["llama-dense-b"], tmp_path / "m.gguf")) as model:
        for n_ctx in (2 ** 31 - 256, 2 ** 40):
            with pytest.raises(ggraph.PlacementError, match=rf"{n_ctx} needs \d+ MiB of cache, \d+ MiB are free"):
                ggraph.Context(model, n_ctx=n_ctx)
        for bad in ({"n_ctx": -1}, {"n_threads": 1000}, {"n_batch": 0}, {"n_ubatch": 0}, {"n_seq_max": 0},
                    {"flash_attn": "maybe"}, {"pooling": "max"}, {"type_k": "q9"}, {"rope": {"angle": 3}}):
            with pytest.raises(ggraph.Error):
                ggraph.Context(model, **bad)


@pytest.mark.parametrize("mode", ["on", "off"])
def test_packed_or_not_gives_the_same_within_rounding(mode: str, tmp_path: Path) -> None:
    path = spec.write(spec.specs()["llama-dense-b"], tmp_path / "m.gguf", "Q8_0")
    rows = []
    for repack in (mode, "auto"):
        with ggraph.Model(path, repack=repack) as model, ggraph.Context(model, n_ctx=256) as ctx:
            batch = ggraph.Batch()
            for t in (5, 9, 70):
                batch.add(t, None, 0, output=True)
            ctx.process("decode", batch)
            rows.append(ctx.logits.copy())
    assert float(((rows[0] - rows[1]) ** 2).sum() / (rows[1] ** 2).sum()) < 5e-3
