"""Where loading fails: each allocation in turn, no device, a device that is too small. Afterwards nothing is allocated on it."""
from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggraph
from ggraph import placement
from ggraph.backends import cuda
from ggraph.backends.cuda import Cuda
from ggraph.backends.cuda.emulator import Emulator
from ggraph.errors import BackendError
from ggraph.placement import parse_device
from tests import adapters, spec

N_LAYER = 2


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spec.write(spec.specs()["llama-dense"], tmp_path_factory.mktemp("models") / "m.gguf")


class Machine:
    """The emulated devices that were opened."""

    def __init__(self) -> None:
        self.devices: list[Emulator] = []
        self.options: dict[str, Any] = {}

    def open(self, number: int = 0) -> Emulator:
        self.devices.append(Emulator(**self.options))
        return self.devices[-1]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("GGRAPH_BACKEND", "cuda")
    monkeypatch.setattr(placement, "MARGIN", 0)
    found = Machine()
    monkeypatch.setattr(cuda, "open_device", found.open)
    yield found
    gc.collect()
    assert all(d.allocated == 0 and d.closed for d in found.devices)


def logits(path: Path, n_ctx: int = 256, offload_kqv: bool = True, **options: Any) -> tuple[np.ndarray, int]:
    """Of a prompt of five; and how many layers were on the device."""
    with ggraph.Model(path, **options) as model, ggraph.Context(model, n_ctx=n_ctx, n_batch=16, n_threads=1,
                                                               offload_kqv=offload_kqv) as ctx:
        batch = ggraph.Batch()
        for i, token in enumerate((5, 3, 9, 7, 7)):
            batch.add(token, i, 0, output=True)
        ctx.process("decode", batch)
        n = 0 if ctx.placement.device is None else model.hparams.n_layer + 1 - ctx.placement.first
        return np.array(ctx.logits), n


def allocations(path: Path, machine: Machine, **options: Any) -> int:
    """How many allocations a run makes."""
    machine.options = {}
    logits(path, **options)
    return machine.devices[-1].n_allocs


def close(x: np.ndarray, y: np.ndarray) -> bool:
    return float(np.square(x - y).sum() / np.square(y).sum()) < 1e-6


def test_every_allocation_may_fail_once(path: Path, machine: Machine) -> None:
    """With "auto", fewer layers go to the device, and the logits are right; a number that was asked for is an error."""
    expected, n_layers = logits(path)
    n = allocations(path, machine)
    assert n_layers == N_LAYER + 1 and n > 5
    for number in range(n):
        machine.options = {"failing": [number]}
        try:
            found, fewer = logits(path)
            assert fewer == n_layers - 1 and close(found, expected)
        except ggraph.BackendError as e:            # of a weight without a layer, which the first run takes
            assert number == n - 1 and "bytes are asked for" in str(e)
    for number in range(n):
        machine.options = {"failing": [number]}
        with pytest.raises(ggraph.PlacementError if number < n - 1 else ggraph.BackendError, match="bytes are asked for"):
            logits(path, n_gpu_layers="all")


def test_a_device_that_gives_nothing_leaves_all_to_the_cpu(path: Path, machine: Machine,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    expected, _ = logits(path)
    machine.options = {"failing": range(10_000)}
    with pytest.raises(ggraph.PlacementError, match=r"does not hold 2 of 3 layers .*give fewer"):
        logits(path, n_gpu_layers=2)
    machine.options = {"total": 0}
    capsys.readouterr()
    found, n_layers = logits(path)
    assert n_layers == 0 and close(found, expected)
    assert "no layer fits the memory of cuda; running on the CPU" in capsys.readouterr().err


def test_auto_counts_weights_cache_and_arena(path: Path, machine: Machine) -> None:
    """As many layers as the memory holds go there, without an allocation that fails; a larger context leaves room for fewer."""
    sizes = []
    for total in range(100_000, 7_000_000, 1_200_000):
        machine.options = {"total": total}
        small, large = logits(path)[1], logits(path, n_ctx=1024)[1]
        sizes.append(small)
        assert large <= small
    assert sizes == sorted(sizes) and sizes[0] == 0 and sizes[-1] == N_LAYER + 1


def test_a_context_that_does_not_fit_leaves_the_model_as_it_was(path: Path, machine: Machine) -> None:
    with ggraph.Model(path, n_gpu_layers="all") as model:
        with ggraph.Context(model, n_ctx=256, n_batch=16, n_threads=1) as ctx:
            device = ctx.backends[0]
            assert isinstance(device, Cuda) and isinstance(device.device, Emulator)
            emulator = device.device
            before = emulator.allocated
            emulator.total = before + 1000
            with pytest.raises(ggraph.PlacementError, match="does not hold 3 of 3 layers"):
                ggraph.Context(model, n_ctx=4096, n_threads=1)
            gc.collect()
            assert emulator.allocated == before
        gc.collect()
        assert 0 < emulator.allocated < before              # the weights


def test_no_device_is_a_sentence_and_the_cpu(path: Path, monkeypatch: pytest.MonkeyPatch,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    def fail(number: int = 0) -> Emulator:
        raise BackendError("the driver finds no CUDA device; nvidia-smi tells more")
    monkeypatch.setattr(cuda, "open_device", fail)
    monkeypatch.delenv("GGRAPH_BACKEND", raising=False)
    assert logits(path, n_gpu_layers=2)[0].shape[0] == 5
    assert "no CUDA device; nvidia-smi tells more; running on the CPU" in capsys.readouterr().err
    with pytest.raises(BackendError, match="no CUDA device"):
        logits(path, device="CUDA0")
    monkeypatch.setenv("GGRAPH_BACKEND", "cuda")
    with pytest.raises(BackendError, match="no CUDA device"):
        logits(path)


def test_a_device_is_named(path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert logits(path, device="none")[1] == 0 and not machine.devices
    monkeypatch.delenv("GGRAPH_BACKEND")
    assert logits(path)[1] == 0 and not machine.devices
    assert logits(path, device="CUDA0")[1] == N_LAYER + 1 and len(machine.devices) == 1
    assert [parse_device(name) for name in (None, "none", "CPU", "CUDA0", "gpu1")] == [None, None, None, 0, 1]
    with pytest.raises(ggraph.PlacementError, match="device is 'TPU0'; it must be 'CUDA0'"):
        logits(path, device="TPU0")
    with pytest.raises(ggraph.PlacementError, match="exclude one another"):
        logits(path, device="CUDA0", backend="ref")


@pytest.mark.parametrize("rules", [{"ffn_": "TPU"}, {"(": "CPU"}])
def test_what_is_wrong_leaves_nothing_open(path: Path, machine: Machine, rules: dict[str, str]) -> None:
    with pytest.raises(ggraph.Error, match="override_tensor"):
        logits(path, override_tensor=rules)
    assert all(d.closed for d in machine.devices)


def test_what_the_device_lacks_runs_on_the_cpu_and_is_told_once(path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch,
                                                                capsys: pytest.CaptureFixture[str]) -> None:
    expected, _ = logits(path)
    capsys.readouterr()
    monkeypatch.setattr(cuda, "can", lambda node, max_shared: node.op != "rms_norm")
    assert close(logits(path)[0], expected)
    assert capsys.readouterr().err.count("cuda has no kernel for rms_norm of F32: it runs on the CPU") == 1


def test_an_adapter_whose_upload_is_interrupted_is_uploaded_again(path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch,
                                                                  tmp_path: Path) -> None:
    shape = next(ne for name, ne, _ in spec.specs()["llama-dense"]["tensors"] if name == "blk.1.attn_output.weight")
    pairs = {"blk.1.attn_output.weight": adapters.pair("blk.1.attn_output.weight", shape, 4)}
    lora = ggraph.Adapter(adapters.write_lora(tmp_path / "l.gguf", "llama", pairs, 8.0))
    real, found = Cuda.upload, list[np.ndarray]()

    def upload(*args: Any) -> None:
        monkeypatch.setattr(Cuda, "upload", real)
        raise KeyboardInterrupt
    for interrupted in (False, True):
        with ggraph.Model(path) as model, ggraph.Context(model, n_ctx=256, n_batch=16) as ctx:
            if interrupted:
                monkeypatch.setattr(Cuda, "upload", upload)
                with pytest.raises(KeyboardInterrupt):
                    ctx.set_adapters([(lora, 1.0)])
            ctx.set_adapters([(lora, 1.0)])
            batch = ggraph.Batch()
            batch.add(5, 0, 0, output=True)
            ctx.process("decode", batch)
            found.append(np.array(ctx.logits))
    np.testing.assert_array_equal(found[0], found[1])
