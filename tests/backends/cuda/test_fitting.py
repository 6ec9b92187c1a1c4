"""As many layers as fit a device: what is counted is what is taken, to the byte, and then nothing fails."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ggraph
from ggraph import placement
from ggraph.backend import OutOfMemory
from ggraph.backends import cuda
from ggraph.backends.cuda.emulator import Emulator
from ggraph.placement import Placement, Wish, fitting
from ggraph.tensor import F32, leaf
from tests import spec, tiny


class Watched(Emulator):
    """Knows the most that was allocated at once, and how often there was no room."""
    peak = refused = 0

    def _alloc(self, nbytes: int) -> int:
        try:
            address = super()._alloc(nbytes)
        except OutOfMemory:
            self.refused += 1
            raise
        self.peak = max(self.peak, self.allocated + nbytes)
        return address


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list[Watched]]]:
    """Call it with how many bytes the next devices have; the devices that were opened."""
    monkeypatch.setenv("GGRAPH_BACKEND", "cuda")
    monkeypatch.setattr(placement, "MARGIN", 0)
    devices: list[Watched] = []

    def with_memory(total: int) -> list[Watched]:
        def open_device(number: int = 0) -> Watched:
            devices.append(Watched(total))
            return devices[-1]
        monkeypatch.setattr(cuda, "open_device", open_device)
        return devices
    yield with_memory
    assert all(d.closed and d.allocated == 0 for d in devices)


def n_layers(model: ggraph.Model) -> int:
    placed = model.placement
    assert placed is not None
    return 0 if placed.device is None else model.hparams.n_layer + 1 - placed.first


def a_long_text(path: Path, offload_kqv: bool = True, **options: Any) -> tuple[int, str]:
    """(layers on the device, text): drawn there where all are, longer than the context, so that cells move."""
    with ggraph.Model(path, **options) as model, ggraph.LLM(model, n_ctx=256, n_batch=64, n_ubatch=16,
                                                           offload_kqv=offload_kqv) as llm:
        prompt = [tiny.BOS, *(270 + i % 20 for i in range(249))]
        g = llm.generate(prompt, max_tokens=16, context_shift=True, temperature=0.0)
        g.read()
        assert g.shifted
        return n_layers(model), repr(g.tokens)


def decode(path: Path, **options: Any) -> tuple[int, str]:
    with ggraph.Model(path, **options) as model, ggraph.Context(model, n_ctx=512, n_batch=32, n_threads=1) as ctx:
        for n in (20, 15, 1):
            batch = ggraph.Batch()
            for i in range(n):
                batch.add((7 * i) % 90, None, 0, output=i == n - 1)
            if n == 1 and (drawing := ctx.drawing()):
                ctx.draw(batch, drawing)
            else:
                ctx.process("decode", batch)
            ctx.memory.seq_add(0, 0, -1, 5)
        return n_layers(model), ""


Use = Callable[..., tuple[int, str]]
CASES: dict[str, tuple[Callable[[Path], Path], Use, dict[str, Any]]] = {
    "dense": (lambda folder: tiny.write(folder / "m.gguf"), a_long_text, {}),
    "cache on the host": (lambda folder: tiny.write(folder / "m.gguf"), a_long_text, {"offload_kqv": False}),
    "tensors on the host": (lambda folder: tiny.write(folder / "m.gguf"), a_long_text, {"override_tensor": {"ffn_up": "CPU"}}),
    "quantized": (lambda folder: spec.write(spec.specs()["llama-dense"], folder / "m.gguf", "Q8_0"), decode, {}),
    "experts": (lambda folder: spec.write(spec.specs()["qwen3moe-moe"], folder / "m.gguf", "Q4_0"), decode, {}),
    "recurrent": (lambda folder: spec.write(spec.specs()["qwen35-dense"], folder / "m.gguf"), decode, {})}


QUICK = ("dense", "recurrent")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CASES])
def test_a_byte_less_is_a_layer_less(name: str, tmp_path: Path, opened: Callable[[int], list[Watched]]) -> None:
    write, use, options = CASES[name]
    path = write(tmp_path)
    devices = opened(1 << 34)
    everything, text = use(path, **options)
    assert everything > 2
    for n in range(1, everything + 1):
        devices = opened(1 << 34)
        use(path, n_gpu_layers=n, **options)
        peak = devices[-1].peak
        for total, expected in ((peak, n), (peak - 1, n - 1)):
            devices = opened(total)
            found, same = use(path, **options)
            assert (found, same, devices[-1].refused) == (expected, text, 0), (n, total)


def test_fitting_counts_from_the_output_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output first, then the last layer; the embedding comes with all of them."""
    monkeypatch.setattr(placement, "MARGIN", 0)
    sizes = {"token_embd.weight": 48, "blk.0.ffn_up.weight": 200, "blk.1.ffn_up.weight": 300, "output.weight": 100}
    weights = {name: leaf(F32, (n * cuda.ALIGN // 4,), name) for name, n in sizes.items()}

    def n(free: int, need: Callable[[Placement], int] = lambda placed: 0, **wish: Any) -> int:
        host, device = (cuda.Cuda(Emulator(free * cuda.ALIGN)) for _ in range(2))
        return fitting(Placement(host, device), weights, 2, Wish(**wish), need)
    assert [n(free) for free in (0, 99, 100, 399, 400, 647, 648)] == [0, 0, 1, 1, 2, 2, 3]
    assert [n(free, lambda placed: 20 * cuda.ALIGN * (3 - placed.first)) for free in (439, 440)] == [1, 2]
    assert [n(free, override_tensor={"blk.1": "CPU"}) for free in (99, 100, 347, 348)] == [0, 2, 2, 3]
