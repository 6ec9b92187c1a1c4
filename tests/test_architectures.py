"""Every architecture against llama.cpp: logits of tiny random models, in all scenarios and on all variants."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggraph
from ggraph.model import known_architectures
from tests import spec

TOLERANCE = {None: 1e-5, "Q8_0": 3e-3, "Q4_0": 8e-3}    # NMSE; quantized: llama.cpp rounds activations to 8 bits
PICK, DECODE = [0, 1, 7, 15, 31, 39], list(range(40, 48))
PAIR = [0, 5, 39, 40, 45, 74, *range(75, 83)]
# name -> (sequences, unified, n_ubatch, weight type, rows of the golden)
SCENARIOS: dict[str, tuple[int, bool, int, str | None, list[int]]] = {
    "single": (1, True, 64, None, PICK + DECODE), "single_ub7": (1, True, 7, None, PICK + DECODE),
    "multi": (2, True, 64, None, PAIR), "multi_streams": (2, False, 64, None, PAIR),
    "q8_0": (1, True, 64, "Q8_0", PICK + DECODE), "q4_0": (1, True, 64, "Q4_0", PICK + DECODE)}

LOGITS = np.load(spec.FOLDER / "logits.npz")
EXTRA = np.load(spec.FOLDER / "extra.npz")
SHAPES = np.load(spec.FOLDER / "shapes.npz")
KNOWN = {name.replace("_", "-") for name in known_architectures()}

# Here llama.cpp mixes the tokens of two sequences, so that one's logits depend on the other; ours are those of "single".
MIXED = {"plamo2-dense/multi", "plamo2-dense/multi_streams"}


def known(arch: str) -> bool:
    return arch.replace("_", "-") in KNOWN


def nmse(got: np.ndarray, want: np.ndarray) -> float:
    got, want = got.astype(np.float64), want.astype(np.float64)
    return float(((got - want) ** 2).sum() / (want ** 2).sum())


def logits(path: Path, *, n_seq: int, unified: bool, n_ubatch: int, n_prefill: int = 40, n_decode: int, type_kv: str = "f16",
           flash_attn: str = "off", n_gpu_layers: int | str = "auto") -> np.ndarray:
    """All rows: n_prefill - 5 s tokens of each sequence s in one batch, then n_decode joint decodes."""
    ids, rows = iter(spec.tokens() * 8), []
    lengths = [n_prefill - 5 * s for s in range(n_seq)]
    with ggraph.Model(path, n_gpu_layers=n_gpu_layers) as model, ggraph.Context(
            model, n_ctx=256 * n_seq, n_batch=256, n_ubatch=n_ubatch, n_seq_max=n_seq, kv_unified=unified, type_k=type_kv,
            type_v=type_kv, flash_attn=flash_attn, n_threads=2) as ctx:
        for step in [lengths] + [[1] * n_seq] * n_decode:
            batch = ggraph.Batch()
            for s, n in enumerate(step):
                for _ in range(n):
                    batch.add(next(ids), None, s, output=True)
            ctx.process("decode", batch)
            rows.append(ctx.logits.copy())
    return np.concatenate(rows)


@pytest.mark.parametrize("case", [c for c in LOGITS.files if known(spec.specs()[c.split("/")[0]]["arch"])])
def test_golden(case: str, tmp_path: Path) -> None:
    name, scenario = case.split("/")
    n_seq, unified, n_ubatch, qtype, rows = SCENARIOS[scenario]
    path = spec.write(spec.specs()[name], tmp_path / "m.gguf", qtype)
    got, want = logits(path, n_seq=n_seq, unified=unified, n_ubatch=n_ubatch, n_decode=8 // n_seq)[rows], LOGITS[case]
    if case in MIXED:
        got, want = got[[0, 2]], LOGITS[f"{name}/single"][[0, 5]]           # positions 0 and 39 of the first sequence
        assert nmse(LOGITS[case][[0, 2]], want) > 0.01
    assert nmse(got, want) <= TOLERANCE[qtype]


@pytest.mark.parametrize("case", [c for c in spec.variants() if known(c["spec"]["arch"])], ids=lambda c: c["name"])
def test_variant(case: dict[str, Any], tmp_path: Path) -> None:
    path = spec.write(case["spec"], tmp_path / "m.gguf", case["type"])
    got = logits(path, n_seq=case["n_seq"], unified=case["unified"], n_ubatch=case["n_ubatch"], n_prefill=case["n_prefill"],
                 n_decode=case["n_decode"], type_kv=case["type_kv"], flash_attn=case["flash_attn"])[case["rows"]]
    assert nmse(got, EXTRA[case["name"]]) <= case["tolerance"]


@pytest.mark.parametrize("case", spec.shapes(), ids=lambda c: c["name"])
def test_shape(case: dict[str, Any], tmp_path: Path) -> None:
    """Rules that the golden specs are too small to show: more layers, experts, loops, gates, windows, fused matrices."""
    path = spec.write(case["spec"], tmp_path / "m.gguf")
    got = logits(path, n_seq=1, unified=True, n_ubatch=16, n_prefill=30, n_decode=2)[case["rows"]]
    want = SHAPES[case["name"]]
    possible = np.isfinite(want)                            # a token without a row in the output has -inf
    assert (np.isfinite(got) == possible).all()
    assert nmse(got[possible], want[possible]) <= TOLERANCE[None]
