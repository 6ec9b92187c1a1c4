"""A GPU through CuPy: memory, one stream, kernels that NVRTC compiled, captured graphs. As thin as can be.

CuPy is imported when a device is opened; what may be missing then (driver, GPU, wheel) was looked for in `diagnosis` before.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ggraph.backend import OutOfMemory

from . import cublas, nvrtc
from .device import Device, Dim, Kernel

HOST_TO_DEVICE, DEVICE_TO_HOST, WITHIN_DEVICE = 1, 2, 3
MAX_DYNAMIC_SHARED = 8              # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
WITHOUT_ASKING = 48 * 1024          # bytes of shared memory that every kernel may have


class CupyDevice(Device):
    def __init__(self, number: int = 0):
        super().__init__()
        import cupy
        self.runtime, self.driver = cupy.cuda.runtime, cupy.cuda.driver
        properties = self.runtime.getDeviceProperties(number)
        self.name = properties["name"].decode()
        self.n_processors, self.max_shared = properties["multiProcessorCount"], properties["sharedMemPerBlockOptin"]
        self.capability = properties["major"], properties["minor"]
        self.target = "sm_{}{}".format(*self.capability)
        self.runtime.setDevice(number)
        self.runtime.free(0)                                    # makes the context
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.pinned = cupy.cuda.alloc_pinned_memory
        self.modules: dict[tuple[str, Any], int] = {}
        self.library = cublas.library() is not None
        self.cublas: cublas.Cublas | None = None                # made when it is first used: it takes memory

    def _alloc(self, nbytes: int) -> int:
        try:
            address = int(self.runtime.malloc(nbytes))
        except self.runtime.CUDARuntimeError as e:
            free, _ = self.memory()
            raise OutOfMemory(f"{self.name} has no room for {nbytes / 2**20:.0f} MiB ({free / 2**20:.0f} MiB are free)") from e
        self.runtime.memsetAsync(address, 0, nbytes, self.stream.ptr)
        return address

    def _free(self, address: int) -> None:
        self.sync()
        self.runtime.free(address)

    def memory(self) -> tuple[int, int]:
        free, total = self.runtime.memGetInfo()
        return int(free), int(total)

    def sync(self) -> None:
        self.stream.synchronize()

    def begin_capture(self) -> None:
        self.recording = True
        self.stream.begin_capture()

    def end_capture(self) -> Any:
        self.recording = False
        return self.stream.end_capture()

    def _close(self) -> None:
        if self.cublas is not None:
            self.cublas.close()
        for module in self.modules.values():
            self.driver.moduleUnload(module)

    def _function(self, kernel: Kernel) -> Any:
        module = self.modules.get((kernel.file, kernel.defines))
        if module is None:
            image = nvrtc.cubin(kernel.file, kernel.defines, self.target)
            module = self.modules[kernel.file, kernel.defines] = self.driver.moduleLoadData(image)
        function = self.driver.moduleGetFunction(module, kernel.name)
        self.driver.funcSetAttribute(function, MAX_DYNAMIC_SHARED, WITHOUT_ASKING)
        return function

    def _launch(self, function: Any, grid: Dim, block: Dim, shared: int, args: np.ndarray) -> None:
        if shared > WITHOUT_ASKING:
            self.driver.funcSetAttribute(function, MAX_DYNAMIC_SHARED, shared)
        self.driver.launchKernel(function, *grid, *block, shared, self.stream.ptr, args.ctypes.data, 0)

    def _multiply(self, a: int, b: int, c: int, n: int, m: int, k: int, type: int) -> None:
        if self.cublas is None:
            self.cublas = cublas.Cublas(self.stream.ptr)
        self.cublas.multiply(a, b, c, n, m, k, type)

    def _upload(self, address: int, data: np.ndarray) -> None:
        self.runtime.memcpyAsync(address, data.ctypes.data, data.nbytes, HOST_TO_DEVICE, self.stream.ptr)

    def _download(self, address: int, nbytes: int) -> np.ndarray:
        return self._fetch(address, nbytes)()

    def _fetch(self, address: int, nbytes: int) -> Callable[[], np.ndarray]:
        """Into page-locked memory: a copy into any other would wait for the device."""
        memory = self.pinned(nbytes)
        self.runtime.memcpyAsync(memory.ptr, address, nbytes, DEVICE_TO_HOST, self.stream.ptr)
        event = self.stream.record()

        def wait() -> np.ndarray:
            event.synchronize()
            data: np.ndarray = np.frombuffer(memory, np.uint8, nbytes).copy()
            return data
        return wait

    def _copy(self, to: int, address: int, nbytes: int) -> None:
        self.runtime.memcpyAsync(to, address, nbytes, WITHIN_DEVICE, self.stream.ptr)

    def _replay(self, graph: Any) -> None:
        graph.launch(self.stream)
