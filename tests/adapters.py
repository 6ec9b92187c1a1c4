"""Random LoRAs and control vectors for golden specs, the same models with the change merged, and the cases that llama.cpp answers.

Adapters come from NumPy's frozen MT19937 stream, as the models do.
"""
from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from tests import spec

NAMES = ("llama-dense", "llama-moe-b")                  # that llama.cpp answers
LORAS = ((4, 8.0), (3, 0.0))                            # rank and alpha of each
# case -> (scales of the LoRAs, strength of the control vector)
CASES: dict[str, tuple[tuple[float, float], float]] = {
    "plain": ((0.0, 0.0), 0.0), "one": ((1.0, 0.0), 0.0), "two": ((0.5, -1.5), 0.0), "vector": ((0.0, 0.0), 2.0)}
LAYERS = (1, 2)                                         # of the control vector
NO_LORA = ("norm", "conv", "position_embd", "ssm_a", "ssm_d")


class Files(NamedTuple):
    model: Path
    loras: list[Path]


def batch() -> list[tuple[int, int, int]]:
    """(token, position, sequence) of every row."""
    return [((31 * p + 7) % 128, p, 0) for p in range(12)]


def targets(name: str) -> dict[str, list[int]]:
    """The matrices of a spec that a LoRA changes here."""
    return {t: shape for t, shape, _ in spec.specs()[name]["tensors"]
            if t.endswith(".weight") and len(shape) > 1 and not any(s in t for s in NO_LORA)}


def pair(base: str, ne: list[int], rank: int) -> tuple[np.ndarray, np.ndarray]:
    """(A, B) in NumPy order: [.., rank, n_in] and [.., n_out, rank]; of token_embd [n_vocab, rank] and [n_embd, rank]."""
    rng = np.random.RandomState(zlib.crc32(f"{base} {rank}".encode()))
    shapes = ((ne[1], rank), (ne[0], rank)) if base == "token_embd.weight" else (
        (*ne[:1:-1], rank, ne[0]), (*ne[:1:-1], ne[1], rank))
    a, b = (rng.standard_normal(shape).astype(np.float32) * np.float32(0.15) for shape in shapes)
    return a, b


def delta(base: str, ne: list[int], lora: int) -> np.ndarray:
    """What the LoRA adds to a weight at scale 1, in NumPy order, float64."""
    rank, alpha = LORAS[lora]
    a, b = (x.astype(np.float64) for x in pair(base, ne, rank))
    product: np.ndarray = (a @ b.T if base == "token_embd.weight" else b @ a) * (alpha / rank if alpha else 1.0)
    return product


def deltas(name: str, scales: Sequence[float]) -> dict[str, np.ndarray]:
    return {base: np.sum([scale * delta(base, ne, i) for i, scale in enumerate(scales)], axis=0)
            for base, ne in targets(name).items()}


def directions(name: str) -> np.ndarray:
    """float32 [n_layer - 1, n_embd]: of layers 1, 2, .."""
    keys = {key.rpartition(".")[2]: value for key, _, value in spec.specs()[name]["kv"]}
    shape = keys["block_count"] - 1, keys["embedding_length"]
    rows: np.ndarray = np.random.RandomState(5).standard_normal(shape).astype(np.float32) * np.float32(0.3)
    return rows


def write_lora(path: Path, arch: str, pairs: Mapping[str, tuple[np.ndarray, np.ndarray]], alpha: float, **kv: Any) -> Path:
    w = gguf.GGUFWriter(path, arch)
    for key, value in ({"general.type": "adapter", "adapter.type": "lora"} | kv).items():
        w.add_string(key, value)
    if alpha:
        w.add_float32("adapter.lora.alpha", alpha)
    return _finish(w, path, {f"{base}.lora_{part}": x for base, ab in pairs.items() for part, x in zip("ab", ab)})


def write_vector(path: Path, rows: Mapping[int, np.ndarray]) -> Path:
    return _finish(gguf.GGUFWriter(path, "controlvector"), path, {f"direction.{il}": row for il, row in rows.items()})


def _finish(w: Any, path: Path, tensors: Mapping[str, np.ndarray]) -> Path:
    for name, x in tensors.items():
        w.add_tensor(name, x)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def write(folder: Path, name: str) -> Files:
    """The model of a golden spec and its LoRAs."""
    s = spec.specs()[name]
    loras = [write_lora(folder / f"{name}-{i}.gguf", s["arch"], {t: pair(t, ne, rank) for t, ne in targets(name).items()}, alpha)
             for i, (rank, alpha) in enumerate(LORAS)]
    return Files(spec.write(s, folder / f"{name}.gguf"), loras)
