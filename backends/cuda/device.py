"""The device seam: all that the CUDA backend asks of a GPU. Implementations: CuPy, and an emulator on the host.

In: addresses, bytes, kernels with their launch geometry. Out: the same on a device, in order, on one stream. It counts copies and
launches, so that tests can hold them to a limit. It knows nothing of tensors.
"""
from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ggraph.errors import BackendError

from .source import kernels

Dim = tuple[int, int, int]
MAX_GRID = (2**31 - 1, 65535, 65535)
LARGEST_ARG = 2048                  # bytes: whoever records a launch may copy so many from where an argument begins


class Kernel(NamedTuple):
    """A kernel of file `kernels/<file>.cu`, compiled with these macros defined: `(("TYPE", "Q4_K"),)`."""
    file: str
    name: str
    defines: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return self.name + "".join(f" {v}" for _, v in self.defines)


LIBRARY = Kernel("", "multiply")        # no kernel of ours: `Device.multiply`


class Device(ABC):
    """One GPU. Addresses are integers; what is launched or copied runs in that order. Errors: `BackendError`."""
    name: str
    library = False                     # whether `multiply` can run
    max_shared: int                     # bytes of shared memory that one block may ask for

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()           # uploads, downloads, launches, replays since `reset`
        self.functions: dict[Kernel, Any] = {}
        self.sizes: dict[int, int] = {}                 # bytes of each allocation, by address
        self.recording = False
        self.closed = False

    @property
    def allocated(self) -> int:
        """Bytes that are allocated."""
        return sum(self.sizes.values())

    def alloc(self, nbytes: int) -> int:
        """The address of zeroed memory, aligned to 256 bytes. `OutOfMemory` where there is none left."""
        address = self._alloc(nbytes)
        self.sizes[address] = nbytes
        return address

    def free(self, address: int) -> None:
        self._free(address)
        del self.sizes[address]

    def close(self) -> None:
        """Free all that is left; a second time does nothing."""
        if not self.closed:
            self.closed = True
            for address in list(self.sizes):
                self.free(address)
            self._close()

    def function(self, kernel: Kernel) -> Any:
        """The compiled kernel; compiled when it is first asked for."""
        if kernel not in self.functions:
            self.functions[kernel] = self._function(kernel)
        return self.functions[kernel]

    def launch(self, kernel: Kernel, grid: Dim, block: Dim, shared: int, args: np.ndarray) -> None:
        """Start a kernel: `args` uint64 [n] holds the address of each argument's bytes, which are read at once."""
        check_geometry(kernel, grid, block, shared, self.max_shared, kernels(kernel.file)[kernel.name])
        self.counts["launches"] += 1
        self._launch(self.function(kernel), grid, block, shared, args)

    def multiply(self, args: np.ndarray) -> None:
        """A product of the library: `args` uint64 [7], addresses of the words a, b, c, n, m, k, type: c F32 [m][n] = b [m][k] times
        a [n][k], both of that type, F16 or BF16. It is not recorded."""
        self.counts["launches"] += 1
        self._multiply(*(ctypes.c_int64.from_address(int(word)).value for word in args))

    def upload(self, address: int, data: np.ndarray) -> None:
        """Host to device; `data` may be changed as soon as this returns."""
        if data.nbytes:
            self.counts["uploads"] += 1
            self._upload(address, np.ascontiguousarray(data).reshape(-1).view(np.uint8))

    def download(self, address: int, nbytes: int) -> np.ndarray:
        """Device to host, after all that was launched: uint8 [nbytes]."""
        self.counts["downloads"] += 1
        return self._download(address, nbytes)

    def fetch(self, address: int, nbytes: int) -> Callable[[], np.ndarray]:
        """Device to host, behind what was launched, without waiting; what is returned waits, and gives uint8 [nbytes]."""
        self.counts["downloads"] += 1
        return self._fetch(address, nbytes)

    def copy(self, to: int, address: int, nbytes: int) -> None:
        """Within the device, behind what was launched."""
        self._copy(to, address, nbytes)

    def replay(self, graph: Any) -> None:
        """All launches of a graph, with one call."""
        self.counts["replays"] += 1
        self._replay(graph)

    @abstractmethod
    def _alloc(self, nbytes: int) -> int: ...
    @abstractmethod
    def _free(self, address: int) -> None: ...
    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """(free, total) bytes."""
    @abstractmethod
    def sync(self) -> None: ...
    @abstractmethod
    def begin_capture(self) -> None:
        """What is launched from here on is recorded and does not run. Copies are not allowed."""
    @abstractmethod
    def end_capture(self) -> Any:
        """The recorded launches, with the arguments they had, for `replay`."""
    @abstractmethod
    def _close(self) -> None: ...
    @abstractmethod
    def _function(self, kernel: Kernel) -> Any: ...
    @abstractmethod
    def _launch(self, function: Any, grid: Dim, block: Dim, shared: int, args: np.ndarray) -> None: ...
    @abstractmethod
    def _multiply(self, a: int, b: int, c: int, n: int, m: int, k: int, type: int) -> None: ...
    @abstractmethod
    def _upload(self, address: int, data: np.ndarray) -> None: ...
    @abstractmethod
    def _download(self, address: int, nbytes: int) -> np.ndarray: ...
    @abstractmethod
    def _fetch(self, address: int, nbytes: int) -> Callable[[], np.ndarray]: ...
    @abstractmethod
    def _copy(self, to: int, address: int, nbytes: int) -> None: ...
    @abstractmethod
    def _replay(self, graph: Any) -> None: ...


def check_geometry(kernel: Kernel, grid: Dim, block: Dim, shared: int, max_shared: int, max_threads: int) -> None:
    """BackendError for a launch that a GPU would refuse, or might for want of registers."""
    if any(not 1 <= n <= limit for n, limit in zip(grid, MAX_GRID)):
        raise BackendError(f"kernel {kernel}: a grid of {_times(grid)} blocks cannot be launched")
    if min(block) < 1 or block[0] * block[1] * block[2] > max_threads or block[2] > 64:
        raise BackendError(f"kernel {kernel}: a block of {_times(block)} threads cannot be launched")
    if not 0 <= shared <= max_shared:
        raise BackendError(f"kernel {kernel}: {shared} bytes of shared memory; a block can have {max_shared}")


def _times(dim: Sequence[int]) -> str:
    return " x ".join(map(str, dim))
