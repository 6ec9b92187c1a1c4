"""Models for measuring speed: the shapes of well-known ones, random weights. Speed does not depend on what the weights are.

In: a shape's name, a type for the matrices. Out: a GGUF file. A megabyte of random blocks of each type is made and repeated, so
that 8 billion weights are written as fast as the disk takes them.

    python bench/synthetic.py llama-8b Q4_K FILE.gguf
"""
from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ggraph import dtypes, quants
from ggraph.dtypes import DType
from ggraph.writer import Spec, Writer, encode, replacing

CHUNK = 1 << 20
NORM, MATRIX, OUTPUT, DECAY = "norm", "matrix", "output", "decay"
Tensor = tuple[str, tuple[int, ...], str]               # name, shape, what it is


def llama(n_layer: int, n_embd: int, n_ff: int, n_head: int, n_head_kv: int, head: int, n_vocab: int, tied: bool
          ) -> tuple[str, dict[str, Any], list[Tensor]]:
    kv = {**_common(n_layer, n_embd, n_ff, n_head, n_head_kv, head, n_vocab), "attention.layer_norm_rms_epsilon": 1e-5,
          "rope.dimension_count": head, "rope.freq_base": 500000.0}
    tensors: list[Tensor] = [("token_embd", (n_embd, n_vocab), OUTPUT), ("output_norm", (n_embd,), NORM)]
    tensors += [] if tied else [("output", (n_embd, n_vocab), OUTPUT)]
    for il in range(n_layer):
        layer: list[Tensor] = [("attn_norm", (n_embd,), NORM), ("ffn_norm", (n_embd,), NORM), *_ffn(n_embd, n_ff),
                               *_attention(n_embd, n_head, n_head_kv, head, 1)]
        tensors += [(f"blk.{il}.{name}", ne, kind) for name, ne, kind in layer]
    return "llama", kv, tensors


def qwen35(n_layer: int, n_embd: int, n_ff: int, n_head: int, n_head_kv: int, head: int, n_vocab: int, n_state_heads: int, d: int
           ) -> tuple[str, dict[str, Any], list[Tensor]]:
    inner = n_state_heads * d
    kv = {**_common(n_layer, n_embd, n_ff, n_head, n_head_kv, head, n_vocab), "attention.layer_norm_rms_epsilon": 1e-6,
          "rope.dimension_count": 64, "rope.dimension_sections": [11, 11, 10, 0], "rope.freq_base": 1e7,
          "full_attention_interval": 4, "ssm.conv_kernel": 4, "ssm.state_size": d,
          "ssm.group_count": n_state_heads, "ssm.time_step_rank": n_state_heads,
          "ssm.inner_size": inner}
    tensors: list[Tensor] = [("token_embd", (n_embd, n_vocab), OUTPUT), ("output_norm", (n_embd,), NORM)]
    delta: list[Tensor] = [
        ("attn_qkv", (n_embd, 3 * inner), MATRIX), ("attn_gate", (n_embd, inner), MATRIX), ("ssm_conv1d", (4, 3 * inner), NORM),
        ("ssm_dt.bias", (n_state_heads,), NORM), ("ssm_a", (n_state_heads,), DECAY), ("ssm_beta", (n_embd, n_state_heads), NORM),
        ("ssm_alpha", (n_embd, n_state_heads), NORM), ("ssm_norm", (d,), NORM), ("ssm_out", (inner, n_embd), MATRIX)]
    whole: list[Tensor] = [*_attention(n_embd, n_head, n_head_kv, head, 2), ("attn_q_norm", (head,), NORM),
                           ("attn_k_norm", (head,), NORM)]
    for il in range(n_layer):
        layer: list[Tensor] = [("attn_norm", (n_embd,), NORM), ("post_attention_norm", (n_embd,), NORM), *_ffn(n_embd, n_ff),
                               *(delta if (il + 1) % 4 else whole)]
        tensors += [(f"blk.{il}.{name}", ne, kind) for name, ne, kind in layer]
    return "qwen35", kv, tensors


def _common(n_layer: int, n_embd: int, n_ff: int, n_head: int, n_head_kv: int, head: int, n_vocab: int) -> dict[str, Any]:
    return {"block_count": n_layer, "embedding_length": n_embd, "feed_forward_length": n_ff, "context_length": 131072,
            "attention.head_count": n_head, "attention.head_count_kv": n_head_kv, "attention.key_length": head,
            "attention.value_length": head, "vocab_size": n_vocab}


def _attention(n_embd: int, n_head: int, n_head_kv: int, head: int, q_parts: int) -> list[Tensor]:
    return [("attn_q", (n_embd, q_parts * n_head * head), MATRIX), ("attn_k", (n_embd, n_head_kv * head), MATRIX),
            ("attn_v", (n_embd, n_head_kv * head), MATRIX), ("attn_output", (n_head * head, n_embd), MATRIX)]


def _ffn(n_embd: int, n_ff: int) -> list[Tensor]:
    return [("ffn_gate", (n_embd, n_ff), MATRIX), ("ffn_up", (n_embd, n_ff), MATRIX), ("ffn_down", (n_ff, n_embd), MATRIX)]


SHAPES = {
    "llama-8b": lambda: llama(32, 4096, 14336, 32, 8, 128, 128256, tied=False),
    "llama-1b": lambda: llama(16, 2048, 8192, 32, 8, 64, 128256, tied=True),
    "llama-tiny": lambda: llama(2, 256, 512, 4, 2, 64, 512, tied=True),
    "qwen35-0.8b": lambda: qwen35(24, 1024, 3584, 8, 2, 256, 248320, 16, 128),
    "qwen35-tiny": lambda: qwen35(4, 256, 512, 4, 2, 64, 512, 4, 64),
}


def write(shape: str, name: str, path: Path) -> Path:
    """The file; matrices of type `name`, embedding and output in Q6_K where those are K-quants of fewer bits."""
    arch, kv, tensors = SHAPES[shape]()
    types = {NORM: dtypes.F32, DECAY: dtypes.F32, MATRIX: dtypes.parse(name)}
    types[OUTPUT] = dtypes.Q6_K if name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K") else types[MATRIX]
    n_vocab = kv["vocab_size"]
    head = {f"{arch}.{key}": encode(_kind(value), value) for key, value in kv.items()}
    head = {"general.architecture": encode("STRING", arch), **head, "tokenizer.ggml.model": encode("STRING", "test"),
            "tokenizer.ggml.tokens": encode("ARRAY:STRING", [f"tok_{i}" for i in range(n_vocab)]),
            "tokenizer.ggml.scores": encode("ARRAY:FLOAT32", [0.0] * n_vocab)}
    specs = [Spec(tensor if tensor.endswith((".bias", "ssm_a")) else f"{tensor}.weight", ne, types[kind])
             for tensor, ne, kind in tensors]
    rng = np.random.default_rng(1)
    random = {t: random_blocks(t, rng) for t in set(types.values()) if t is not dtypes.F32}
    with replacing(path) as out:
        writer = Writer(out, head, specs)
        for spec, (_, _, kind) in zip(specs, tensors):
            writer.write_parts(_parts(spec, kind, random, rng))
        writer.finish()
    return path


def _kind(value: Any) -> str:
    return "ARRAY:INT32" if isinstance(value, list) else "FLOAT32" if isinstance(value, float) else "UINT32"


def _parts(spec: Spec, kind: str, random: dict[DType, np.ndarray], rng: np.random.Generator) -> Iterator[np.ndarray]:
    if spec.type is dtypes.F32:
        values = rng.standard_normal(spec.nbytes // 4, np.float32) * np.float32(0.02)
        values = -np.abs(values) - 1 if kind == DECAY else values + ("norm" in spec.name)
        yield values.astype(np.float32).view(np.uint8)
        return
    left = spec.nbytes
    while left:
        part = random[spec.type][:left]
        left -= len(part)
        yield part


def random_blocks(type: DType, rng: np.random.Generator) -> np.ndarray:
    """About a megabyte of blocks: weights of about 0.02."""
    n = CHUNK // type.nbytes
    packed = quants.quantize(rng.standard_normal((16, 16 * type.block), np.float32) * np.float32(0.02), type)
    blocks = packed.reshape(-1, type.nbytes)
    data: np.ndarray = np.ascontiguousarray(blocks[rng.integers(0, len(blocks), n)]).reshape(-1)
    return data


if __name__ == "__main__":
    write(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
