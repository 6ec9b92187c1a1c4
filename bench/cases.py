"""What is measured: files, tests, and the ratio to llama.cpp (or the part of the memory's bandwidth) that is to be held.

In: nothing. Out: `CASES`. Files are looked for by name in one folder; `README.md` says where they come from.
"""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One test of one file. `ratio`: tokens/s over llama.cpp's; `ceiling`: decoding speed over what reading every byte of the
    file once per token would allow."""
    file: str
    n_prompt: int = 0
    n_gen: int = 0
    n_depth: int = 0
    n_parallel: int = 1
    ratio: float | None = None
    ceiling: float | None = None


def _llama(types: str, prompt: float, decode: float | None, ceiling: float | None, deep: float | None) -> list[Case]:
    cases = []
    for name in types.split():
        file = f"llama-1b-{name}.gguf"
        cases += [Case(file, n_prompt=256, ratio=prompt), Case(file, n_gen=64, ratio=decode, ceiling=ceiling)]
        if deep is not None:
            cases.append(Case(file, n_gen=32, n_depth=2048, ratio=deep))
    return cases


CASES = [
    Case("smollm2.gguf", n_prompt=512, ratio=6.0), Case("smollm2.gguf", n_prompt=512, n_depth=2048, ratio=3.5),
    Case("smollm2.gguf", n_gen=128, ratio=2.2), Case("smollm2.gguf", n_gen=128, n_depth=2048, ratio=2.3),
    Case("smollm2.gguf", n_gen=64, n_depth=512), Case("smollm2.gguf", n_gen=64, n_depth=1024),
    Case("smollm2.gguf", n_gen=64, n_depth=4096),
    Case("smollm2.gguf", n_gen=64, n_parallel=8, ratio=6.0),
    Case("gemma3.gguf", n_prompt=512, ratio=3.0), Case("gemma3.gguf", n_gen=128, ratio=1.6),
    Case("gemma3.gguf", n_gen=128, n_depth=2048, ratio=1.7),
    Case("qwen35-0.8b-Q4_K.gguf", n_prompt=256, ratio=2.5), Case("qwen35-0.8b-Q4_K.gguf", n_gen=64, ratio=1.7),
    *_llama("Q4_0 Q4_K", 1.9, None, 0.92, 1.15),
    *_llama("Q5_K Q6_K Q8_0 IQ4_XS", 2.4, 1.2, 0.90, 1.2),
    *_llama("F16 BF16", 1.2, None, 0.92, 1.0),
    *_llama("Q4_1 Q5_0 Q5_1 Q2_K Q3_K IQ4_NL IQ3_S IQ3_XXS IQ2_S IQ2_XS IQ2_XXS IQ1_S IQ1_M TQ1_0 TQ2_0 MXFP4",
            1.5, 1.0, None, None),
]
