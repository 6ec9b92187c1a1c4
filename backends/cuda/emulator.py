"""Test equipment: a `Device` that runs the same kernels on the host, compiled with a C++ compiler.

It is never chosen by itself: only tests and GGRAPH_CUDA_DEVICE=emulator open it. Each launch runs at once, block after block, the
threads of a block as fibers (`kernels/emulator.cuh`). Memory has margins that are checked for writes past its end.
"""
from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ggraph import dtypes, env
from ggraph.backend import OutOfMemory
from ggraph.errors import BackendError

from . import source
from .device import LARGEST_ARG, Device, Dim, Kernel

# A misaligned access, which a GPU refuses, ends the process.
FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-fsanitize=alignment",
         "-fsanitize-undefined-trap-on-error", "-w", "-shared", "-fPIC", "-DGGRAPH_EMULATOR"]
TWINS = {"mma.cuh"}                    # headers with such instructions
MARGIN = 256
PATTERN = 0xA5
_RUNNING = threading.Lock()             # fibers and shared memory are statics of the compiled file


class Emulator(Device):
    """`total` bytes of memory can be allocated; what goes beyond is `OutOfMemory`, as on a device. `failing`: numbers of
    allocations, from 0 on, that fail however much is free."""
    name = "CUDA emulator"
    max_shared = 227 * 1024

    def __init__(self, total: int = 1 << 34, failing: Collection[int] = ()):
        super().__init__()
        self.total, self.failing, self.n_allocs = total, failing, 0
        self.compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
        if self.compiler is None:
            raise BackendError("the CUDA emulator needs a C++ compiler; install g++")
        self.blocks: dict[int, tuple[np.ndarray, int]] = {}         # address -> (its memory with margins, bytes)
        self.modules: dict[tuple[str, source.Defines], ctypes.CDLL] = {}
        self.recorded: list[tuple[Any, Dim, Dim, int, list[bytes]]] = []
        self.last: Kernel | None = None

    # --- memory

    def _alloc(self, nbytes: int) -> int:
        number, self.n_allocs = self.n_allocs, self.n_allocs + 1
        if self.allocated + nbytes > self.total or number in self.failing:
            raise OutOfMemory(f"{nbytes} bytes are asked for, {self.total - self.allocated} are free")
        raw = np.zeros(nbytes + 3 * MARGIN, np.uint8)
        start = MARGIN + -(raw.ctypes.data) % MARGIN
        raw[:start] = raw[start + nbytes:] = PATTERN
        address = int(raw.ctypes.data) + start
        self.blocks[address] = raw, nbytes
        return address

    def _free(self, address: int) -> None:
        self._check(address)
        del self.blocks[address]

    def _check(self, address: int) -> None:
        raw, nbytes = self.blocks[address]
        start = address - int(raw.ctypes.data)
        if (raw[:start] != PATTERN).any() or (raw[start + nbytes:] != PATTERN).any():
            raise BackendError(f"a kernel wrote outside of its memory of {nbytes} bytes; the last one was {self.last}")

    def memory(self) -> tuple[int, int]:
        return self.total - self.allocated, self.total

    def _inside(self, address: int, nbytes: int) -> None:
        if not any(start <= address and address + nbytes <= start + n for start, (_, n) in self.blocks.items()):
            raise BackendError(f"a copy of {nbytes} bytes does not lie within one allocation")

    def _upload(self, address: int, data: np.ndarray) -> None:
        self._inside(address, data.nbytes)
        ctypes.memmove(address, data.ctypes.data, data.nbytes)

    def _download(self, address: int, nbytes: int) -> np.ndarray:
        self.sync()
        self._inside(address, nbytes)
        return np.frombuffer(ctypes.string_at(address, nbytes), np.uint8)

    def _fetch(self, address: int, nbytes: int) -> Callable[[], np.ndarray]:
        data = self._download(address, nbytes)
        return lambda: data

    def _copy(self, to: int, address: int, nbytes: int) -> None:
        self._inside(to, nbytes)
        self._inside(address, nbytes)
        ctypes.memmove(to, address, nbytes)

    def sync(self) -> None:
        for address in self.blocks:
            self._check(address)

    # --- kernels

    def _function(self, kernel: Kernel) -> Any:
        module = self.modules.get((kernel.file, kernel.defines))
        if module is None:
            module = self.modules[kernel.file, kernel.defines] = ctypes.CDLL(str(self.build(kernel.file, kernel.defines)))
        function = module[f"launch_{kernel.name}"]
        function.restype = None
        return kernel, function, int(module[f"arity_{kernel.name}"]())

    def build(self, file: str, defines: source.Defines) -> Path:
        """The shared library of a kernel file, from the cache folder where it was built before."""
        assert self.compiler is not None
        folder = env.make_cache_dir("emulator")
        library = folder / (source.key(file, defines, self.compiler, *FLAGS) + ".so")
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=folder) as d:
                text = source.source(file)
                for name, content in source.headers(text).items():
                    Path(d, name).write_text(content)
                Path(d, "kernel.cpp").write_text(text + glue(source.kernels(file)))
                macros = [f"-D{k}={v}" for k, v in defines]
                command = [self.compiler, *FLAGS, *macros, "-I", d, f"{d}/kernel.cpp", "-o", f"{d}/kernel.so"]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    raise BackendError(f"{file}.cu does not compile for the emulator: {done.stderr.strip()[:2000]}")
                Path(d, "kernel.so").replace(library)
        return library

    def _launch(self, function: Any, grid: Dim, block: Dim, shared: int, args: np.ndarray) -> None:
        kernel, run, arity = function
        if len(args) != arity:
            raise BackendError(f"kernel {kernel} takes {arity} arguments, not {len(args)}")
        if self.recording:
            self.recorded.append((function, grid, block, shared, [ctypes.string_at(int(a), LARGEST_ARG) for a in args]))
        else:
            self._run(kernel, run, grid, block, shared, args)

    def _run(self, kernel: Kernel, run: Any, grid: Dim, block: Dim, shared: int, args: np.ndarray) -> None:
        self.last = kernel
        with _RUNNING:
            run((ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block), ctypes.c_size_t(shared), ctypes.c_void_p(args.ctypes.data))

    library = True

    def _multiply(self, a: int, b: int, c: int, n: int, m: int, k: int, type: int) -> None:
        assert not self.recording, "products of the library are not recorded"
        weights, x = (_floats(address, rows * k, type).reshape(rows, k) for address, rows in ((a, n), (b, m)))
        _array(c, m * n, ctypes.c_float)[:] = (x @ weights.T).reshape(-1)

    def begin_capture(self) -> None:
        self.recording, self.recorded = True, []

    def end_capture(self) -> Any:
        self.recording = False
        return self.recorded

    def _replay(self, graph: Any) -> None:
        for (kernel, run, _), grid, block, shared, values in graph:
            self._run(kernel, run, grid, block, shared, np.array([_address(v) for v in values], np.uint64))

    def _close(self) -> None:
        self.modules.clear()


def _address(data: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def _array(address: int, n: int, kind: Any) -> np.ndarray:
    return np.ctypeslib.as_array((kind * n).from_address(address))


def _floats(address: int, n: int, type: int) -> np.ndarray:
    words = _array(address, n, ctypes.c_uint16)
    if type == dtypes.F16.id:
        return words.view(np.float16).astype(np.float32)
    return (words.astype(np.uint32) << 16).view(np.float32)


def twins() -> list[str]:
    """Kernels whose path on a GPU is not what runs here: those with instructions that have a twin on the host, and the library."""
    return [*(f"{file}.{name}" for file in source.files() if TWINS & source.headers(source.source(file)).keys()
              for name in source.kernels(file)), "multiply (cuBLAS)"]


def glue(names: Iterable[str]) -> str:
    """What makes kernels callable from outside."""
    return "".join(
        f'\nextern "C" unsigned arity_{n}() {{ return emulator::arity({n}); }}'
        f'\nextern "C" void launch_{n}(const unsigned * g, const unsigned * b, size_t shared, void ** a) '
        f"{{ emulator::launch({n}, g, b, shared, a); }}" for n in names)
