"""cuBLAS through ctypes: products of 16-bit matrices into float32, on the stream of the device.

In: addresses and sizes. Out: nothing; the result is on the device. It is looked for where NVRTC is; without it the device says so
by `Device.library`, and all products run by the backend's own kernels.
"""
from __future__ import annotations

import ctypes
from functools import cache

from ggraph import dtypes
from ggraph.errors import BackendError

from . import nvrtc

NOT_TURNED, TURNED = 0, 1
F32 = 0                             # cudaDataType
KINDS = {dtypes.F16.id: 2, dtypes.BF16.id: 14}
COMPUTE_32F, DEFAULT = 68, -1


@cache
def library() -> ctypes.CDLL | None:
    """The first that loads; None if none does."""
    for path in nvrtc.candidates("cublas"):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


class Cublas:
    """A handle on one stream. `BackendError` where there is no library or it refuses."""

    def __init__(self, stream: int):
        found = library()
        if found is None:
            raise BackendError("cuBLAS is not found")
        self.library, self.handle = found, ctypes.c_void_p()
        self._check(found.cublasCreate_v2(ctypes.byref(self.handle)))
        self._check(found.cublasSetStream_v2(self.handle, ctypes.c_void_p(stream)))

    def multiply(self, a: int, b: int, c: int, n: int, m: int, k: int, type: int) -> None:
        """c F32 [m][n] = b [m][k] times a [n][k], both of `type` (its id in GGUF), rows one behind the other."""
        kind = KINDS[type]
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        self._check(self.library.cublasGemmEx(
            self.handle, TURNED, NOT_TURNED, n, m, k, ctypes.byref(one), ctypes.c_void_p(a), kind, k, ctypes.c_void_p(b), kind, k,
            ctypes.byref(zero), ctypes.c_void_p(c), F32, n, COMPUTE_32F, DEFAULT))

    def close(self) -> None:
        self.library.cublasDestroy_v2(self.handle)

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise BackendError(f"cuBLAS failed with status {status}")
