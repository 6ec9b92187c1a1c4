"""What the NVIDIA driver says, through ctypes: the CUDA version that it can run, and its devices. Needs no CuPy.

In: nothing. Out: numbers; `BackendError` where there is no driver or it refuses. It launches nothing.
"""
from __future__ import annotations

import ctypes
import sys
from typing import Any, NamedTuple

from ggraph.errors import BackendError

MAJOR, MINOR = 75, 76               # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
NO_DEVICE = 100                     # CUDA_ERROR_NO_DEVICE


class Gpu(NamedTuple):
    name: str
    capability: tuple[int, int]
    free: int                       # bytes
    total: int


def library() -> ctypes.CDLL:
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        return ctypes.CDLL(name)
    except OSError as e:
        raise BackendError(f"there is no NVIDIA driver ({name} cannot be loaded)") from e


def version(lib: Any) -> tuple[int, int]:
    """The newest CUDA that the driver can run."""
    number = ctypes.c_int()
    _check(lib, lib.cuDriverGetVersion(ctypes.byref(number)), "tell its version")
    return number.value // 1000, number.value % 1000 // 10


def gpus(lib: Any) -> list[Gpu]:
    """All devices; none where the driver finds none."""
    status = lib.cuInit(0)
    if status == NO_DEVICE:
        return []
    _check(lib, status, "start")
    n = ctypes.c_int()
    _check(lib, lib.cuDeviceGetCount(ctypes.byref(n)), "count its devices")
    return [_gpu(lib, number) for number in range(n.value)]


def _gpu(lib: Any, number: int) -> Gpu:
    device, name, major, minor = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_int(), ctypes.c_int()
    _check(lib, lib.cuDeviceGet(ctypes.byref(device), number), "open a device")
    _check(lib, lib.cuDeviceGetName(name, len(name), device), "name a device")
    for attribute, value in ((MAJOR, major), (MINOR, minor)):
        _check(lib, lib.cuDeviceGetAttribute(ctypes.byref(value), attribute, device), "describe a device")
    return Gpu(name.value.decode(), (major.value, minor.value), *_memory(lib, device))


def _memory(lib: Any, device: ctypes.c_int) -> tuple[int, int]:
    """(free, total); asking for it needs a context, which is given back at once."""
    context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    _check(lib, lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "open a context")
    try:
        _check(lib, lib.cuCtxPushCurrent_v2(context), "open a context")
        try:
            _check(lib, lib.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)), "tell its memory")
        finally:
            lib.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    finally:
        lib.cuDevicePrimaryCtxRelease_v2(device)
    return free.value, total.value


def _check(lib: Any, status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        lib.cuGetErrorString(status, ctypes.byref(text))
        raise BackendError(f"the NVIDIA driver cannot {what}: {(text.value or b'error %d' % status).decode()}")
