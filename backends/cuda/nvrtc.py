"""NVRTC through ctypes: the kernels compiled for a GPU, which needs neither a GPU nor headers of CUDA.

In: a kernel file, macros, a target ("sm_90"). Out: a cubin, from the cache folder where it was made before.
"""
from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from ctypes.util import find_library
from functools import cache
from pathlib import Path

from ggraph import env
from ggraph.errors import BackendError

from . import source

OPTIONS = ("--std=c++17", "--ftz=false", "--extra-device-vectorization")
MISSING = "NVRTC, CUDA's compiler, is not found; pip install 'ggraph-runtime[cuda13]' (CUDA 12 drivers: [cuda12])"


def candidates(stem: str = "nvrtc") -> list[str]:
    """Where a library of CUDA may be: wheels of NVIDIA, CUDA_HOME, the system; newest first."""
    found = [path for folder in sys.path if folder for path in Path(folder).glob(f"nvidia/*/lib*/lib{stem}.so.*")]
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    found += Path(home).glob(f"lib64/lib{stem}.so.*")
    names = [str(p) for p in sorted(found, key=lambda p: p.name, reverse=True) if "alt" not in p.name and "builtins" not in p.name]
    return [*names, *filter(None, [find_library(stem)])]


@cache
def library() -> ctypes.CDLL:
    """The first that loads. `BackendError` if none does."""
    for path in candidates():
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise BackendError(MISSING)


def version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def cubin(file: str, defines: source.Defines, target: str) -> bytes:
    """The compiled file. `BackendError` with the compiler's words where it does not compile."""
    folder = env.make_cache_dir("cuda")
    path = folder / (source.key(file, defines, target, str(version()), *OPTIONS) + ".cubin")
    if not path.exists():
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(compiled(file, defines, target))
        temporary.replace(path)
    return path.read_bytes()


def compiled(file: str, defines: source.Defines, target: str) -> bytes:
    """The same without the cache."""
    text = source.source(file)
    options = (*OPTIONS, f"-arch={target}", *(f"-D{k}={v}" for k, v in defines))
    return _compile(f"{file}.cu", text, source.headers(text), options, f"for {target}")


def _compile(name: str, text: str, headers: Mapping[str, str], options: Sequence[str], what: str) -> bytes:
    names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
    texts = (ctypes.c_char_p * len(headers))(*(content.encode() for content in headers.values()))
    nvrtc, program = library(), ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), len(headers), texts, names))
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*(o.encode() for o in options)))
        if status:
            log = _text(program, "ProgramLog").rstrip(b"\0").decode().strip() or _error(status)
            raise BackendError(f"{name} does not compile {what}: {log[:2000]}")
        return _text(program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def trial(target: str) -> None:
    """Compile nothing for a target: `BackendError` where the compiler does not know it, or lacks parts of itself."""
    _compile("trial.cu", "", {}, (f"-arch={target}",), f"for {target}")


def _text(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(library(), f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(library(), f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _check(status: int) -> None:
    if status:
        raise BackendError(f"NVRTC failed: {_error(status)}")


def _error(status: int) -> str:
    get = library().nvrtcGetErrorString
    get.restype = ctypes.c_char_p
    return str(get(status).decode())
