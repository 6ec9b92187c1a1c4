"""A GPU through CuPy: memory, one stream, kernels that NVRTC compiled, captured graphs. As thin as can be.

CuPy is imported when a device is opened; what may be missing then (driver, GPU, wheel) was looked for in `diagnosis` before.
"""
from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from ggraph import env
from ggraph.backend import OutOfMemory
from ggraph.errors import BackendError

from . import cublas, nvrtc
from .device import Device, Dim, Kernel

HOST_TO_DEVICE, DEVICE_TO_HOST, WITHIN_DEVICE = 1, 2, 3
NO_MEMORY = 2                       # cudaErrorMemoryAllocation
MAX_DYNAMIC_SHARED = 8              # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
STATIC_SHARED = 1024                # bytes that a kernel with dynamic shared memory has beside it, at most
WITHOUT_ASKING = 48 * 1024          # bytes of shared memory that every kernel may have
P = ParamSpec("P")
R = TypeVar("R")


def on_device(method: Callable[Concatenate[CupyDevice, P], R]) -> Callable[Concatenate[CupyDevice, P], R]:
    """Each thread has a current device, which is this one here; what CUDA refuses is a `BackendError` in its words."""
    @wraps(method)
    def call(self: CupyDevice, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if not getattr(self.threads, "bound", False):
            self.runtime.setDevice(self.number)
            self.threads.bound = True
        try:
            return method(self, *args, **kwargs)
        except (self.runtime.CUDARuntimeError, self.driver.CUDADriverError) as e:
            raise BackendError(f"{self.name}: {e}") from e
    return call


class CupyDevice(Device):
    def __init__(self, number: int = 0):
        super().__init__()
        import cupy
        self.runtime, self.driver = cupy.cuda.runtime, cupy.cuda.driver
        self.number, self.threads = number, threading.local()
        properties = self.runtime.getDeviceProperties(number)
        self.name = properties["name"].decode()
        self.max_shared = properties["sharedMemPerBlockOptin"] - STATIC_SHARED
        self.capability = properties["major"], properties["minor"]
        self.target = "sm_{}{}".format(*self.capability)
        self.runtime.setDevice(number)
        self.runtime.free(0)                                    # makes the context
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.pinned = cupy.cuda.alloc_pinned_memory
        self.modules: dict[tuple[str, Any], int] = {}
        self.library = cublas.library() is not None
        self.cublas: cublas.Cublas | None = None                # made when it is first used: it takes memory

    @on_device
    def _alloc(self, nbytes: int) -> int:
        try:
            address = int(self.runtime.malloc(nbytes))
        except self.runtime.CUDARuntimeError as e:
            if e.status != NO_MEMORY:
                raise
            free, _ = self.memory()
            raise OutOfMemory(f"{self.name} has no room for {nbytes / 2**20:.0f} MiB ({free / 2**20:.0f} MiB are free)") from e
        self.runtime.memsetAsync(address, 0, nbytes, self.stream.ptr)
        return address

    @on_device
    def _free(self, address: int) -> None:
        self.stream.synchronize()
        self.runtime.free(address)

    @on_device
    def memory(self) -> tuple[int, int]:
        free, total = self.runtime.memGetInfo()
        return int(free), int(total)

    @on_device
    def sync(self) -> None:
        self.stream.synchronize()

    @on_device
    def begin_capture(self) -> None:
        self.recording = True
        self.stream.begin_capture()

    @on_device
    def end_capture(self) -> Any:
        self.recording = False
        return self.stream.end_capture()

    def close(self) -> None:
        """A device on which a kernel failed frees nothing any more; the driver does when the process ends."""
        try:
            super().close()
        except BackendError as e:
            env.log(f"the device was closed after an error: {e}")

    @on_device
    def _close(self) -> None:
        if self.cublas is not None:
            self.cublas.close()
        for module in self.modules.values():
            self.driver.moduleUnload(module)

    @on_device
    def _function(self, kernel: Kernel) -> Any:
        module = self.modules.get((kernel.file, kernel.defines))
        if module is None:
            image = nvrtc.cubin(kernel.file, kernel.defines, self.target)
            module = self.modules[kernel.file, kernel.defines] = self.driver.moduleLoadData(image)
        function = self.driver.moduleGetFunction(module, kernel.name)
        self.driver.funcSetAttribute(function, MAX_DYNAMIC_SHARED, WITHOUT_ASKING)
        return function

    @on_device
    def _launch(self, function: Any, grid: Dim, block: Dim, shared: int, args: np.ndarray) -> None:
        if shared > WITHOUT_ASKING:
            self.driver.funcSetAttribute(function, MAX_DYNAMIC_SHARED, shared)
        self.driver.launchKernel(function, *grid, *block, shared, self.stream.ptr, args.ctypes.data, 0)

    @on_device
    def _multiply(self, a: int, b: int, c: int, n: int, m: int, k: int, type: int) -> None:
        if self.cublas is None:
            self.cublas = cublas.Cublas(self.stream.ptr)
        self.cublas.multiply(a, b, c, n, m, k, type)

    @on_device
    def _upload(self, address: int, data: np.ndarray) -> None:
        self.runtime.memcpyAsync(address, data.ctypes.data, data.nbytes, HOST_TO_DEVICE, self.stream.ptr)

    def _download(self, address: int, nbytes: int) -> np.ndarray:
        return self._fetch(address, nbytes)()

    @on_device
    def _fetch(self, address: int, nbytes: int) -> Callable[[], np.ndarray]:
        """Into page-locked memory: a copy into any other would wait for the device."""
        memory = self.pinned(nbytes)
        self.runtime.memcpyAsync(memory.ptr, address, nbytes, DEVICE_TO_HOST, self.stream.ptr)
        event = self.stream.record()
        return lambda: self._wait(event, memory, nbytes)

    @on_device
    def _wait(self, event: Any, memory: Any, nbytes: int) -> np.ndarray:
        event.synchronize()
        data: np.ndarray = np.frombuffer(memory, np.uint8, nbytes).copy()
        return data

    @on_device
    def _copy(self, to: int, address: int, nbytes: int) -> None:
        self.runtime.memcpyAsync(to, address, nbytes, WITHIN_DEVICE, self.stream.ptr)

    @on_device
    def _replay(self, graph: Any) -> None:
        graph.launch(self.stream)
