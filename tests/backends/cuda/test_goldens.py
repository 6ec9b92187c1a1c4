"""llama.cpp's logits through the emulated device: all layers there, and half of them. By default two models in two scenarios.

Where weights are quantized, rounding may send a token to another expert than llama.cpp's does, if the choice was a close call: sums
in another order differ by 1e-7, which moves single values of a cache by a step of f16, of activations by a step of 8 bits, and so
the scores two layers on by up to 1e-2. Then all rows are computed again, with the experts that the CPU backend chooses.
"""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggraph
from ggraph.tensor import Tensor
from tests import spec
from tests import test_architectures as golden

ARCHITECTURES = {"llama", "gemma3", "qwen35", "qwen3moe", "mamba2", "gpt-oss", "deepseek2"}
CLOSE = 0.01                    # of a router's scores, which go up to 1
QUICK = {f"{name}/{scenario}" for name in ("llama-dense", "qwen35-dense") for scenario in ("single", "q8_0")}
CASES: list[Any] = [
    pytest.param(case, layers, marks=[] if case in QUICK and layers == "all" else [pytest.mark.slow], id=f"{case}-{layers}")
    for case in golden.LOGITS.files if spec.specs()[case.split("/")[0]]["arch"] in ARCHITECTURES for layers in ("all", "half")]
VARIANTS: list[Any] = [
    pytest.param(case, marks=[pytest.mark.slow], id=case["name"])
    for case in spec.variants() if case["spec"]["arch"] in ARCHITECTURES]


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGRAPH_BACKEND", "cuda")
    monkeypatch.setenv("GGRAPH_CUDA_DEVICE", "emulator")


@pytest.mark.parametrize(("case", "layers"), CASES)
def test_golden(case: str, layers: str, tmp_path: Path) -> None:
    name, scenario = case.split("/")
    n_seq, unified, n_ubatch, qtype, rows = golden.SCENARIOS[scenario]
    model = spec.specs()[name]
    path = spec.write(model, tmp_path / "m.gguf", qtype)
    n = "all" if layers == "all" else (n_layer(model) + 1) // 2
    got = golden.logits(path, n_seq=n_seq, unified=unified, n_ubatch=n_ubatch, n_decode=8 // n_seq, n_gpu_layers=n)[rows]
    assert distance(case, got, path, n) <= golden.TOLERANCE[qtype]


def distance(case: str, got: np.ndarray, path: Path, n_gpu_layers: int | str) -> float:
    """NMSE; where up to two tokens went to another expert than on the CPU, by a close call, with the CPU's experts."""
    n_seq, _, _, qtype, rows = golden.SCENARIOS[case.split("/")[1]]
    error = golden.nmse(got, golden.LOGITS[case])
    if error <= golden.TOLERANCE[qtype] or qtype is None or n_seq > 1:
        return error
    cpu = Routed()
    cpu.run(path, backend="cpu")
    device = Routed(cpu.chosen)
    again = device.run(path, n_gpu_layers=n_gpu_layers)
    calls = [margin(cpu.scores[name][row], len(cpu.chosen[name][row])) for name, row in device.moved]
    return golden.nmse(again[rows], golden.LOGITS[case]) if 0 < len(calls) <= 2 and max(calls) < CLOSE else error


def margin(scores: np.ndarray, k: int) -> float:
    """How near the last of k chosen experts was to the first one that was not."""
    ordered = -np.sort(-scores)
    return float(ordered[k - 1] - ordered[k])


class Routed:
    """A run of the 48 tokens that looks at which experts each goes to, and sends them to those of another run."""

    def __init__(self, given: Mapping[str, np.ndarray] | None = None):
        self.given, self.first = given, 0
        self.scores: dict[str, np.ndarray] = {}                     # by name of the choice, float32 [48, n_expert]
        self.chosen: dict[str, np.ndarray] = {}                     # int32 [48, n_used]
        self.moved: list[tuple[str, int]] = []                      # choices that the run would have made in another way
        self._last = np.zeros(0)

    def _see(self, name: str, array: np.ndarray, node: Tensor) -> np.ndarray | None:
        seen = array.reshape(-1, array.shape[-1])
        if "topk" not in name:
            self._last = np.array(seen)
            return None
        here = slice(self.first, self.first + len(seen))
        for kept, now in ((self.scores, self._last), (self.chosen, seen)):
            kept.setdefault(name, np.zeros((48, *now.shape[1:]), now.dtype))[here] = now
        if self.given is None:
            return None
        given = self.given[name][here]
        self.moved += [(name, self.first + i) for i, (a, b) in enumerate(zip(seen, given)) if set(a) != set(b)]
        return given.reshape(array.shape)

    def run(self, path: Path, **options: Any) -> np.ndarray:
        """float32 [48, n_vocab]"""
        ids, rows = spec.tokens() * 8, []
        hook = ggraph.Hook(lambda n: n.name.startswith(("ffn_moe_probs", "ffn_moe_topk")), self._see)
        with ggraph.Model(path, **options) as model, ggraph.Context(model, n_ctx=256, n_batch=64, flash_attn="off",
                                                                    on_node=hook) as ctx:
            for self.first in (0, *range(40, 48)):
                batch = ggraph.Batch()
                for token in ids[self.first:max(self.first + 1, 40)]:
                    batch.add(token, None, 0, output=True)
                ctx.process("decode", batch)
                rows.append(np.array(ctx.logits))
        return np.concatenate(rows)


@pytest.mark.parametrize("case", VARIANTS)
def test_variant(case: dict[str, Any], tmp_path: Path) -> None:
    """Every type of weight and cache, long prompts, scaled positions."""
    path = spec.write(case["spec"], tmp_path / "m.gguf", case["type"])
    got = golden.logits(path, n_seq=case["n_seq"], unified=case["unified"], n_ubatch=case["n_ubatch"], n_prefill=case["n_prefill"],
                        n_decode=case["n_decode"], type_kv=case["type_kv"], flash_attn=case["flash_attn"])[case["rows"]]
    assert golden.nmse(got, golden.EXTRA[case["name"]]) <= case["tolerance"]


def n_layer(model: spec.Spec) -> int:
    return next(int(value) for key, _, value in model["kv"] if key.endswith(".block_count"))
