"""Models with a block for next-token prediction (MTP) behind their layers, made from golden specs, and what goldens ask of them.

The block repeats the shapes of the last layer of attention. `weights`: tensors that are given, not random.
"""
from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tests import spec, tiny

# What the block of some architectures has besides the tensors of a layer: those of another layer that match a pattern, new ones;
# and which it has not.
BESIDES: dict[str, tuple[int, str, dict[str, list[int]], str]] = {
    "bailingmoe3-moe": (1, r"ffn_.*(exps|shexp|inp)|exp_probs", {"layer_output_norm.weight": [128]},
        r"ffn_(gate|up|down)\.|shared_head_norm"),
    "mimo2-moe": (0, "^$", {"attn_qkv.weight": [256, 768]}, r"attn_[qkv]\.|ffn_.*(exps|inp)|exp_probs|shared_head_norm"),
    "nemotron_h_moe_latent": (2, "ffn|exp_probs", {"post_attention_norm.weight": [256]}, "^$")}
NAMES = ("qwen35-dense-b", "qwen35moe-moe", "qwen3next-moe", "glm4moe-moe", "hy_v3-moe", "deepseek2-moe", "cohere2moe-moe",
    *BESIDES)
N_PROMPT, N_DRAFT = 20, 3


def layers_spec(name: str) -> spec.Spec:
    """A golden spec, or one of the other shapes."""
    return spec.specs().get(name) or next(c["spec"] for c in spec.shapes() if c["name"] == name)


def nextn_spec(name: str) -> spec.Spec:
    """The same with such a block: the last layer of attention once more, with changes as `BESIDES` says."""
    s = layers_spec(name)
    old = next(v for key, _, v in s["kv"] if key.endswith(".block_count"))
    recurrent = {t.split(".")[1] for t, _, _ in s["tensors"] if ".ssm_" in t}
    last = max(il for t, il in ((t, t.split(".")[1]) for t, _, _ in s["tensors"]) if ".attn_output." in t and il not in recurrent)
    kv = [[key, kind, [*v, v[int(last)]] if key.startswith(s["arch"]) and isinstance(v, list) and len(v) == old else v]
          for key, kind, v in s["kv"] if not key.endswith(".block_count")]
    kv += [[f"{s['arch']}.block_count", "UINT32", old + 1], [f"{s['arch']}.nextn_predict_layers", "UINT32", 1]]
    other, pattern, new, lacking = BESIDES.get(name, (0, "^$", {}, "^$"))
    n = next(v for key, _, v in s["kv"] if key.endswith(".embedding_length"))
    block = _layer(s, last, ".") | _layer(s, str(other), pattern) | new
    block |= {f"nextn.{t}.weight": shape for t, shape in {"eh_proj": [2 * n, n], "enorm": [n], "hnorm": [n],
        "shared_head_norm": [n]}.items()}
    tensors = [[f"blk.{old}.{t}", shape, "F32"] for t, shape in block.items() if not re.search(lacking, t)]
    return {**s, "kv": kv, "tensors": [*s["tensors"], *tensors]}


def _layer(s: spec.Spec, il: str, pattern: str) -> dict[str, list[int]]:
    """Shapes of the tensors of a layer whose names match, by name."""
    prefix = f"blk.{il}."
    found = {t.removeprefix(prefix): shape for t, shape, _ in s["tensors"] if t.startswith(prefix)}
    return {t: shape for t, shape in found.items() if re.search(pattern, t)}


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
