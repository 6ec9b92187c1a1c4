"""Models with a block for next-token prediction (MTP) behind their layers, made from golden specs, and what goldens ask of them.

The block repeats the shapes of the last layer of attention. `weights`: tensors that are given, not random.
"""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tests import spec, tiny

NAMES = ("qwen35-dense-b", "qwen35moe-moe", "qwen3next-moe", "glm4moe-moe", "hy_v3-moe", "deepseek2-moe")
N_PROMPT, N_DRAFT = 20, 3


def nextn_spec(name: str) -> spec.Spec:
    """A golden spec with such a block."""
    s = spec.specs()[name]
    old = next(v for key, _, v in s["kv"] if key.endswith(".block_count"))
    kv = [[key, kind, [*v, v[-1]] if key.startswith(s["arch"]) and isinstance(v, list) and len(v) == old else v]
          for key, kind, v in s["kv"] if not key.endswith((".block_count", "recurrent_layers"))]
    recurrent = [[key, kind, [*v, 0]] for key, kind, v in s["kv"] if key.endswith("recurrent_layers")]
    kv += [*recurrent, [f"{s['arch']}.block_count", "UINT32", old + 1], [f"{s['arch']}.nextn_predict_layers", "UINT32", 1]]
    n = next(v for key, _, v in s["kv"] if key.endswith(".embedding_length"))
    shapes = {"eh_proj": [2 * n, n], "enorm": [n], "hnorm": [n], "shared_head_norm": [n]}
    recurrent_layers = {t.split(".")[1] for t, _, _ in s["tensors"] if ".ssm_" in t}
    last = f"blk.{max(il for il in range(old) if str(il) not in recurrent_layers)}."
    block = [[f"blk.{old}." + t.removeprefix(last), shape, kind] for t, shape, kind in s["tensors"] if t.startswith(last)]
    block += [[f"blk.{old}.nextn.{name}.weight", shape, "F32"] for name, shape in shapes.items()]
    return {**s, "kv": kv, "tensors": [*s["tensors"], *block]}


def write(name: str, path: Path, weights: Mapping[str, np.ndarray] | None = None) -> Path:
    s = nextn_spec(name)
    shapes = {t: shape for t, shape, _ in s["tensors"]}
    return spec.write(s, path, deltas={t: w - spec.weights(t, shapes[t]) for t, w in (weights or {}).items()})


def speaking(name: str) -> spec.Spec:
    """Such a model with the tokenizer of `tiny`, for prompts of text."""
    s, t = nextn_spec(name), tiny.tiny()
    n = len(tiny.TOKENS)
    kv = [e for e in s["kv"] if not e[0].startswith("tokenizer.") and not e[0].endswith(".vocab_size")]
    return {**s, "kv": kv + [e for e in t["kv"] if e[0].startswith("tokenizer.")],
            "tensors": [[t, [n if size == 128 and t in ("token_embd.weight", "output.weight") else size for size in shape], kind]
                        for t, shape, kind in s["tensors"]]}
