"""Models that choose blocks of tokens to attend to, made from golden specs, and what goldens ask of them.

MSA runs with F32 caches and flash attention: without it llama.cpp attends to all blocks, and in F16 its sums are so coarse that
close choices of blocks fall out by chance. QSA of llama.cpp sees a part of one more block unless a text ends one token before its
block does; rows in which it does so are left out.
"""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests import spec

Rows = list[tuple[int, int, int]]           # token, position, sequence
EVERYTHING = 1 << 17


@dataclass(frozen=True)
class Case:
    block: int                              # positions in a block
    top_k: int                              # blocks that are chosen
    local: int = 0                          # of them the last ones
    lengths: tuple[int, ...] = (60,)        # of prompts in one batch; with several, each has a stream of its own
    n_ubatch: int = 64
    n_decode: int = 6
    n_head: int = 2                         # for two KV heads
    means: bool = False                     # QSA


CASES = {"blocks_of_4": Case(4, 3, 1), "blocks_of_8": Case(8, 2, n_ubatch=17), "two_last": Case(4, 5, 2, n_ubatch=7),
         "one": Case(16, 1, 1), "grouped_heads": Case(4, 3, 1, n_head=4), "streams": Case(4, 3, 1, (45, 30)),
         "long": Case(16, 6, 2, (300,), n_decode=2),
         "tokens": Case(1, 8, means=True), "means_of_2": Case(2, 4, n_ubatch=7, means=True), "means_of_4": Case(4, 4, means=True),
         "means_streams": Case(4, 2, lengths=(45, 30), means=True), "means_long": Case(4, 12, lengths=(300,), means=True)}


def case_spec(case: Case, everything: bool = False) -> spec.Spec:
    """`everything`: so many blocks are chosen that none is left out."""
    s, n = spec.specs()["qwen4exp-moe" if case.means else "minimax-m3-moe"], case.n_head * 128
    keys = {"context_length": 512, "indexer.top_k": EVERYTHING if everything else case.top_k * (case.block if case.means else 1)}
    if case.means:
        keys |= {"indexer.head_count": 8}
        sizes = {"indexer.q_proj.weight": [256, 8 * 128]}
    else:
        keys |= {"indexer.block_size": case.block, "indexer.local_blocks": case.local, "attention.head_count": case.n_head}
        sizes = {"attn_q.weight": [256, n], "attn_q.bias": [n], "attn_output.weight": [n, 256]}
    kv = [[key, kind, next((v for name, v in keys.items() if key.endswith("." + name)), value)] for key, kind, value in s["kv"]]
    kv += [["qwen4exp.attention.compress_ratios", "ARRAY:UINT32", [0, case.block]]] * case.means
    return {**s, "kv": kv, "tensors": [[t, sizes.get(t.split(".", 2)[-1], shape), kind] for t, shape, kind in s["tensors"]]}


def write(name: str, folder: Path, everything: bool = False) -> Path:
    return spec.write(case_spec(CASES[name], everything), folder / f"{name}.gguf")


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
    """Rows of the golden: about every fourth of the prompts, and the decodes."""
    rows, n = [row for batch in batches(case) for row in batch], sum(case.lengths)
    if case.means and case.block > 1:
        kept = [i for i, (_, pos, _) in enumerate(rows) if pos % case.block == case.block - 2]
    else:
        kept = [*range(3, n, 4), *range(n, len(rows))]
    return [i for i in kept if i < n or decodes]
