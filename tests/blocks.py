"""Models that choose blocks of tokens to attend to, made from golden specs, and what goldens ask of them.

Caches are F32 and flash attention is on: without it llama.cpp attends to all blocks, and in F16 its sums are so coarse that close
choices of blocks fall out by chance.
"""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests import spec

BASE = "minimax-m3-moe"
Rows = list[tuple[int, int, int]]           # token, position, sequence


@dataclass(frozen=True)
class Case:
    block: int                              # positions in a block
    top_k: int                              # blocks that are chosen
    local: int                              # of them the last ones
    lengths: tuple[int, ...] = (60,)        # of prompts in one batch; with several, each has a stream of its own
    n_ubatch: int = 64
    n_decode: int = 6
    n_head: int = 2                         # for two KV heads


CASES = {"blocks_of_4": Case(4, 3, 1), "blocks_of_8": Case(8, 2, 0, n_ubatch=17), "two_last": Case(4, 5, 2, n_ubatch=7),
         "one": Case(16, 1, 1), "grouped_heads": Case(4, 3, 1, n_head=4), "streams": Case(4, 3, 1, (45, 30)),
         "long": Case(16, 6, 2, (300,), n_decode=2)}


def case_spec(case: Case) -> spec.Spec:
    s, n = spec.specs()[BASE], case.n_head * 128
    keys = {"indexer.block_size": case.block, "indexer.top_k": case.top_k, "indexer.local_blocks": case.local,
            "attention.head_count": case.n_head, "context_length": 512}
    kv = [[key, kind, next((v for name, v in keys.items() if key.endswith("." + name)), value)] for key, kind, value in s["kv"]]
    sizes = {"attn_q.weight": [256, n], "attn_q.bias": [n], "attn_output.weight": [n, 256]}
    return {**s, "kv": kv, "tensors": [[t, sizes.get(t.split(".", 2)[-1], shape), kind] for t, shape, kind in s["tensors"]]}


def write(name: str, folder: Path) -> Path:
    return spec.write(case_spec(CASES[name]), folder / f"{name}.gguf")


def batches(case: Case) -> list[Rows]:
    """All prompts, then joint decodes."""
    ids, n, found = iter(spec.tokens() * 8), [0] * len(case.lengths), list[Rows]()
    for lengths in [case.lengths] + [(1,) * len(n)] * case.n_decode:
        found.append([(next(ids), n[s] + i, s) for s, length in enumerate(lengths) for i in range(length)])
        n = [a + b for a, b in zip(n, lengths)]
    return found


def n_ctx(case: Case) -> int:
    return 512 * len(case.lengths)


def picked(case: Case, decodes: bool = True) -> list[int]:
    """Rows of the golden: every fourth of the prompts, and the decodes."""
    n = sum(case.lengths)
    return [*range(3, n, 4), *(range(n, n + case.n_decode * len(case.lengths)) if decodes else ())]
