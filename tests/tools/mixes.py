"""Models for which llama.cpp said what each of its mixes gives every tensor: names and shapes only.

`bench/quantize_peer.py --mixes` asks it and writes tests/golden/mixes.json. The golden specs with wider rows, and deep models by
hand, since the rules count layers, experts and heads.
"""
from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ggraph import dtypes
from tests import spec


@dataclass(frozen=True)
class Shape:
    name: str
    ne: tuple[int, ...]
    type: dtypes.DType = dtypes.F16


@dataclass(frozen=True)
class Outline:
    """A model without its numbers; `kv`: (key, kind, value)."""
    name: str
    kv: list[tuple[str, str, Any]]
    tensors: list[Shape]

    @property
    def values(self) -> dict[str, Any]:
        return {key: value for key, _, value in self.kv}


def outlines() -> Iterator[Outline]:
    for name, one in spec.specs().items():
        kv = [("general.architecture", "STRING", one["arch"]),
              *((key, kind, value) for key, kind, value in one["kv"] if key != "general.architecture" and "tokenizer" not in key)]
        yield Outline(name, kv, [_wide(*row) for row in one["tensors"]])
    yield from (deep("llama", 32, 32, 8), deep("llama", 80, 64, 8), deep("llama", 80, 64, 64), deep("llama", 22, 16, 8, width=1000),
                deep("llama", 32, 32, 8, n_expert=8), deep("llama", 17, 32, 32, n_expert=4, tied=True), deep("qwen2", 80, 64, 8),
                deep("qwen2", 24, 14, 2, tied=True, width=896), deep("falcon", 32, 71, 1, qkv=True),
                deep("falcon", 60, 128, 8, qkv=True, tied=True), deep("llama", 48, 40, 4, width=80))


def _wide(name: str, ne: list[int], kind: str) -> Shape:
    """The first axis of every other matrix is whole super-blocks."""
    odd = sum(map(ord, name)) % 3 == 0
    return Shape(name, (ne[0] if odd else 256 * (1 + ne[0] // 64), *ne[1:]), dtypes.TYPES["F32" if len(ne) == 1 else "F16"])


def deep(arch: str, n_layer: int, n_head: int, n_head_kv: int, n_expert: int = 0, tied: bool = False, qkv: bool = False,
         width: int = 1024) -> Outline:
    kv: list[tuple[str, str, Any]] = [("general.architecture", "STRING", arch)]
    numbers = {"context_length": 2048, "embedding_length": 64 * n_head, "block_count": n_layer, "feed_forward_length": 4096,
               "attention.head_count": n_head, "attention.head_count_kv": n_head_kv, "expert_count": n_expert,
               "expert_used_count": min(2, n_expert), "vocab_size": 512, "rope.dimension_count": 64}
    kv += [(f"{arch}.{key}", "UINT32", value) for key, value in numbers.items()]
    kv += [(f"{arch}.attention.{key}", "FLOAT32", 1e-5) for key in ("layer_norm_rms_epsilon", "layer_norm_epsilon")]
    matrices = {"attn_qkv": (width, 64)} if qkv else {"attn_q": (width, 64), "attn_k": (width, 32), "attn_v": (width, 32)}
    experts = "_exps" if n_expert else ""
    axes = (n_expert,) if n_expert else ()
    matrices |= {"attn_output": (1024, 64), "ffn_gate" + experts: (width, 96, *axes), "ffn_up" + experts: (width, 96, *axes),
                 "ffn_down" + experts: (2048, 32, *axes)} | ({"ffn_gate_inp": (width, n_expert)} if n_expert else {})
    rows = [Shape("token_embd.weight", (width, 512)), Shape("output_norm.weight", (width,), dtypes.F32)]
    rows += [] if tied else [Shape("output.weight", (width, 512))]
    for il in range(n_layer):
        rows.append(Shape(f"blk.{il}.attn_norm.weight", (width,), dtypes.F32))
        rows += [Shape(f"blk.{il}.{name}.weight", ne) for name, ne in matrices.items()]
    name = f"{arch} {n_layer} layers, {n_head}/{n_head_kv} heads, {n_expert} experts, width {width}" + (", tied" if tied else "")
    return Outline(name, kv, rows)


def digest(types: Mapping[str, Mapping[str, str]]) -> str:
    """Of the types by tensor, by mix."""
    lines = [f"{mix} {tensor} {kind}" for mix in sorted(types) for tensor, kind in sorted(types[mix].items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
