"""Scales of matrices beside them, as NVFP4 files have: a product with one is a product with the scaled matrix."""
from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import ggraph
from tests import spec
from tests.test_architectures import logits, nmse


def scaled(s: spec.Spec, *suffixes: str) -> spec.Spec:
    """With scales of every matrix of the layers: one number, or one for each expert."""
    matrices = [(name, shape) for name, shape, _ in s["tensors"] if re.fullmatch(r"blk\..*\.weight", name) and len(shape) > 1
                and not re.search("conv1d|norm", name)]
    more = [[name.replace("weight", suffix), shape[2:] or [1], "F32"] for name, shape in matrices for suffix in suffixes]
    return {**s, "tensors": [*s["tensors"], *more]}


def merged(s: spec.Spec) -> dict[str, np.ndarray]:
    """What the scales add to the matrices."""
    shapes = {name: shape for name, shape, _ in s["tensors"]}
    deltas = {}
    for name, shape in shapes.items():
        scale = name.replace("weight", "scale")
        if scale != name and scale in shapes:
            factor = spec.weights(scale, shapes[scale]).reshape(-1, *(1,) * (len(shape) - 1))
            deltas[name] = spec.weights(name, shape) * (factor - 1)
    return deltas


def run(path: Path) -> np.ndarray:
    return logits(path, n_seq=1, unified=True, n_ubatch=16, n_prefill=20, n_decode=2)


@pytest.mark.parametrize("name", ["llama-dense", "llama-moe-b", "qwen35moe-moe", "mamba2-dense", "minimax-m3-moe", "deepseek2-moe"])
def test_a_scale_multiplies_its_matrix(name: str, tmp_path: Path) -> None:
    s = spec.specs()[name]
    with_scales = scaled(s, "scale", "input_scale")
    got, plain = run(spec.write(with_scales, tmp_path / "s.gguf")), run(spec.write(s, tmp_path / "p.gguf"))
    want = run(spec.write(s, tmp_path / "m.gguf", deltas=merged(with_scales)))
    assert nmse(got, want) <= 1e-8 and nmse(plain, want) > 1e-3


def test_scales_of_inputs_change_nothing(tmp_path: Path) -> None:
    """They are for products that round activations to 4 bits."""
    s = spec.specs()["llama-moe"]
    rows = [run(spec.write(x, tmp_path / "m.gguf", "NVFP4")) for x in (s, scaled(s, "input_scale"))]
    assert np.array_equal(rows[0], rows[1]) and np.abs(rows[0]).max() > 1


def test_one_matrix_for_qkv_with_three_biases(tmp_path: Path) -> None:
    """As with one bias that holds the three; where one of them is missing, none is added, as in llama.cpp."""
    s, rows = spec.specs()["qwen2-dense"], list[np.ndarray]()
    parts = ("attn_q", "attn_k", "attn_v")
    shapes = {name: shape for name, shape, _ in s["tensors"]}
    layers = [n.removesuffix("attn_q.weight") for n in shapes if n.endswith("attn_q.weight")]
    sizes = {il: sum(shapes[f"{il}{p}.weight"][1] for p in parts) for il in layers}
    rest = [t for t in s["tensors"] if not any(f"{p}.weight" in t[0] for p in parts)]
    fused = [*rest, *([f"{il}attn_qkv.weight", [shapes[f"{il}attn_q.weight"][0], n], "F32"] for il, n in sizes.items())]
    whole = [*(t for t in fused if not any(f"{p}.bias" in t[0] for p in parts)),
             *([f"{il}attn_qkv.bias", [n], "F32"] for il, n in sizes.items())]
    joined = {f"{il}attn_qkv.bias": np.concatenate([spec.weights(f"{il}{p}.bias", shapes[f"{il}{p}.bias"]) for p in parts])
              for il in layers}
    none = [t for t in fused if not t[0].endswith("attn_k.bias")]
    for tensors in (fused, whole, none):
        deltas = {t: w - spec.weights(t, list(w.shape)) for t, w in joined.items()} if tensors is whole else None
        rows.append(run(spec.write({**s, "tensors": tensors}, tmp_path / "m.gguf", deltas=deltas)))
    assert nmse(rows[0], rows[1]) <= 1e-10 and nmse(rows[2], rows[1]) > 1e-4


@pytest.mark.parametrize("name", ["granite-dense", "granite_swa-dense", "minicpm-dense"])
def test_a_logit_scale_of_0_scales_nothing(name: str, tmp_path: Path) -> None:
    """llama.cpp divides by it."""
    path, rows = spec.write(spec.specs()[name], tmp_path / "m.gguf"), list[np.ndarray]()
    for scale in (0.0, 1.0):
        overrides = {f"{spec.specs()[name]['arch']}.logit_scale": scale}
        with ggraph.Model(path, kv_overrides=overrides) as model, ggraph.Context(model, n_ctx=256) as ctx:
            batch = ggraph.Batch()
            batch.add(5, None, 0, output=True)
            ctx.process("decode", batch)
            rows.append(ctx.logits.copy())
    assert np.array_equal(rows[0], rows[1]) and np.abs(rows[0]).max() > 1
