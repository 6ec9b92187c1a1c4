"""What is made of CuPy's calls, on a stand-in for CuPy with the host's memory: errors, threads, what is freed. No kernel runs."""
from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ggraph.backend import OutOfMemory
from ggraph.backends.cuda.cupy_device import CupyDevice
from ggraph.backends.cuda.device import Kernel
from ggraph.errors import BackendError

ILLEGAL = 700                       # cudaErrorIllegalAddress


class CudaError(RuntimeError):
    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


class DriverError(CudaError):
    pass


class Runtime:
    """cupy.cuda.runtime of two devices; `current` is that of each thread, 0 at first. `broken`: what any call raises."""
    CUDARuntimeError = CudaError

    def __init__(self) -> None:
        self.current, self.blocks, self.broken, self.room = threading.local(), dict[int, Any](), CudaError(0, ""), 1000

    def check(self) -> None:
        if self.broken.status:
            raise self.broken
        assert getattr(self.current, "device", 0) == 1, "another device is this thread's current one"

    def getDeviceProperties(self, number: int) -> dict[str, Any]:
        return {"name": b"NVIDIA Stand-in", "sharedMemPerBlockOptin": 100_000, "major": 9, "minor": 0}

    def setDevice(self, number: int) -> None:
        self.current.device = number

    def malloc(self, nbytes: int) -> int:
        self.check()
        if nbytes > self.room:
            raise CudaError(2, "cudaErrorMemoryAllocation: out of memory")
        block = ctypes.create_string_buffer(b"\xff" * nbytes, nbytes)
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free(self, address: int) -> None:
        self.check()
        if address:
            del self.blocks[address]

    def memGetInfo(self) -> tuple[int, int]:
        self.check()
        return 300 << 20, 400 << 20

    def memsetAsync(self, address: int, value: int, nbytes: int, stream: int) -> None:
        self.check()
        ctypes.memset(address, value, nbytes)

    def memcpyAsync(self, to: int, address: int, nbytes: int, kind: int, stream: int) -> None:
        self.check()
        ctypes.memmove(to, address, nbytes)


class Stream:
    ptr = 5

    def __init__(self, runtime: Runtime):
        self.synchronize = runtime.check

    def record(self) -> Any:
        return SimpleNamespace(synchronize=self.synchronize)


class Driver:
    """cupy.cuda.driver without kernels."""
    CUDADriverError = DriverError

    def launchKernel(self, *args: Any) -> None:
        raise DriverError(1, "CUDA_ERROR_INVALID_VALUE: invalid argument")


class Pinned(np.ndarray):
    @property
    def ptr(self) -> int:
        return int(self.ctypes.data)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    runtime = Runtime()
    cuda = SimpleNamespace(runtime=runtime, driver=Driver(), Stream=lambda non_blocking: Stream(runtime),
                           alloc_pinned_memory=lambda nbytes: np.zeros(nbytes, np.uint8).view(Pinned))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    yield runtime


def test_memory_is_zeroed_copied_and_freed(runtime: Runtime) -> None:
    device = CupyDevice(1)
    assert (device.name, device.target, device.memory()) == ("NVIDIA Stand-in", "sm_90", (300 << 20, 400 << 20))
    a, b = device.alloc(8), device.alloc(8)
    assert not device.download(a, 8).any()
    device.upload(a, np.arange(8, dtype=np.uint8))
    device.copy(b, a, 8)
    assert device.fetch(b, 8)().tolist() == list(range(8))
    device.close()
    device.close()
    assert not runtime.blocks and device.allocated == 0


def test_what_other_threads_do_is_done_on_the_same_device(runtime: Runtime) -> None:
    device, found = CupyDevice(1), []
    address = device.alloc(4)
    thread = threading.Thread(target=lambda: found.append(device.download(address, 4)))
    thread.start()
    thread.join()
    assert len(found) == 1
    device.close()


def test_no_room_is_told_apart_from_what_else_may_fail(runtime: Runtime) -> None:
    device = CupyDevice(1)
    with pytest.raises(OutOfMemory, match=r"NVIDIA Stand-in has no room for 2 MiB \(300 MiB are free\)"):
        device.alloc(2 << 20)
    with pytest.raises(BackendError, match="NVIDIA Stand-in: CUDA_ERROR_INVALID_VALUE"):
        device._launch(0, (1, 1, 1), (32, 1, 1), 0, np.zeros(1, np.uint64))
    with pytest.raises(BackendError, match="a grid of 0 x 1 x 1 blocks"):
        device.launch(Kernel("rows", "sum_rows"), (0, 1, 1), (32, 1, 1), 0, np.zeros(1, np.uint64))
    device.close()
    assert not runtime.blocks


def test_after_a_kernel_that_failed_closing_says_so_and_hides_nothing(runtime: Runtime, capsys: pytest.CaptureFixture[str]) -> None:
    device = CupyDevice(1)
    wait = device.fetch(device.alloc(4), 4)
    runtime.broken = CudaError(ILLEGAL, "cudaErrorIllegalAddress: an illegal memory access was encountered")
    with pytest.raises(BackendError, match="NVIDIA Stand-in: cudaErrorIllegalAddress") as e:
        wait()
    assert not isinstance(e.value, OutOfMemory)
    with pytest.raises(BackendError) as e:
        device.alloc(4)
    assert not isinstance(e.value, OutOfMemory)
    capsys.readouterr()
    device.close()
    assert "closed after an error: NVIDIA Stand-in: cudaErrorIllegalAddress" in capsys.readouterr().err
