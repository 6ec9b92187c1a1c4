"""Tiny models from specs: the golden specs, or one's own, written as GGUF with weights fixed by tensor name.

The weights come from NumPy's frozen MT19937 stream, so every machine writes the same file. Shapes are in GGUF order.
"""
from __future__ import annotations

import json
import lzma
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Spec = dict[str, Any]
FOLDER = Path(__file__).parent / "golden" / "models"
VALUE = {v.name: v for v in gguf.GGUFValueType}

# Types that get random bits: byte offsets of their float16 scales, and the scale that gives weights of about 0.1.
RANDOM_BITS: dict[str, tuple[list[int], float]] = {
    "Q2_K": ([80, 82], 6.2e-3), "Q3_K": ([108], 2.4e-3), "Q4_K": ([0, 2], 4.0e-4), "Q5_K": ([0, 2], 2.0e-4),
    "Q6_K": ([208], 7.4e-5), "IQ2_XXS": ([0], 2.2e-3), "IQ2_XS": ([0], 2.2e-3), "IQ2_S": ([0], 2.2e-3),
    "IQ3_XXS": ([0], 9.5e-4), "IQ3_S": ([0], 5.5e-4), "IQ1_S": ([0], 1.5e-2), "IQ1_M": ([], 1.5e-2),
    "IQ4_NL": ([0], 1.5e-3), "IQ4_XS": ([0], 8.0e-5), "TQ1_0": ([52], 1.2e-1), "TQ2_0": ([64], 1.2e-1), "MXFP4": ([], 0.0),
    "NVFP4": ([], 0.0)}
NOT_QUANTIZED = ("norm", "ssm_conv1d", "ssm_a", "shortconv.conv", "time_mix", "gate_inp", "rel_b", "position_embd", "token_types")


def _json(name: str) -> Any:
    return json.loads(lzma.decompress((FOLDER / name).read_bytes()))


@cache
def specs() -> dict[str, Spec]:
    """The golden specs by name: arch, kv [[key, type, value]], tensors [[name, shape, type]]."""
    return dict(_json("specs.json.xz"))


@cache
def variants() -> list[dict[str, Any]]:
    """Cases on variants of those: weight and cache types, rope scaling, head shapes, long prompts, windows."""
    return list(_json("extra.json.xz")["cases"])


@cache
def shapes() -> list[dict[str, Any]]:
    """Models of other shapes: llama.cpp's own tensor lists for other key/values. Each: name, spec, rows of its golden."""
    return list(_json("shapes.json.xz"))


@cache
def tokens() -> list[int]:
    return list(_json("extra.json.xz")["tokens"])


def write(spec: Spec, path: str | Path, qtype: str | None = None, deltas: Mapping[str, np.ndarray] | None = None) -> Path:
    """The model of a spec as a file; `qtype`: the type of its matrices, where their row length allows it. `deltas` are added to
    weights that are F32. What matches one of the spec's `factors` is multiplied by it."""
    w = gguf.GGUFWriter(path, spec["arch"])
    for key, kind, value in spec["kv"]:
        kind, _, inner = kind.partition(":")
        if key != "general.architecture":
            w.add_key_value(key, value, VALUE[kind], sub_type=VALUE[inner] if inner else None)
    for name, shape, kind in spec["tensors"]:
        factor = next((f for part, f in spec.get("factors", {}).items() if part in name), 1.0)
        _add(w, name, shape, _type(name, shape, kind, qtype), (deltas or {}).get(name), factor)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return Path(path)


def _type(name: str, shape: list[int], kind: str, qtype: str | None) -> Any:
    types = gguf.GGMLQuantizationType
    if not qtype or not name.endswith(".weight") or len(shape) < 2 or any(s in name for s in NOT_QUANTIZED):
        return types[kind]
    fits = shape[0] % gguf.GGML_QUANT_SIZES[types[qtype]][0] == 0
    return types[qtype if fits else kind]


def _add(w: Any, name: str, shape: list[int], kind: Any, delta: np.ndarray | None, factor: float) -> None:
    if kind.name in RANDOM_BITS:
        w.add_tensor(name, random_blocks(name, shape, kind), raw_dtype=kind)
        return
    data = weights(name, shape) * np.float32(factor)
    if kind.name == "F32":
        w.add_tensor(name, data if delta is None else (data + delta).astype(np.float32))
    elif kind.name == "F16":
        w.add_tensor(name, data.astype(np.float16))
    else:
        w.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)


def weights(name: str, shape: list[int]) -> np.ndarray:
    """Float32 data of one tensor in NumPy order."""
    rng = np.random.RandomState(zlib.crc32(name.encode()))
    w: np.ndarray = rng.standard_normal(size=shape[::-1]).astype(np.float32) * np.float32(0.1)
    if "ssm_a" in name:                                 # state decay must be negative
        w = -np.abs(w) * 10
    elif name.startswith(("rope_factors", "rope_freqs")):
        w = np.abs(w) * 10 + 1
    elif "norm" in name and name.endswith("weight"):
        w = w + 1
    return w


def random_blocks(name: str, shape: list[int], kind: Any) -> np.ndarray:
    """Random bits of a quantized type as bytes (rows..., bytes per row), with scales that make sense."""
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.RandomState(zlib.crc32(f"{name} {kind.name}".encode()))
    n = int(np.prod(shape)) // size
    raw = rng.randint(0, 256, (n, nbytes)).astype(np.uint8)
    offsets, scale = RANDOM_BITS[kind.name]
    if kind.name == "MXFP4":
        raw[:, 0] = rng.randint(122, 125, n)                                # E8M0 exponents
    elif kind.name == "NVFP4":
        raw[:, :4] = rng.randint(0x10, 0x18, (n, 4))                        # E4M3 scales without a sign
    elif kind.name == "IQ1_M":                                              # the scale is spread over four top nibbles
        d = int(np.float16(scale).view(np.uint16))
        for i in range(4):
            raw[:, 49 + 2 * i] = (raw[:, 49 + 2 * i] & 0x0F) | ((d >> (4 * i)) & 0xF) << 4
    for offset in offsets:
        d16 = (scale * (0.75 + 0.5 * rng.random_sample(n))).astype(np.float16)
        raw[:, offset:offset + 2] = d16.view(np.uint8).reshape(n, 2)
    return raw.reshape(*shape[::-1][:-1], -1)
