"""What the CPU backend says of itself: the processor, its vector instructions, the lowering in use, Numba and LLVM."""
from __future__ import annotations

import platform
from collections.abc import Iterator

import llvmlite
import llvmlite.binding as llvm
import numba

from ggraph.backend import Finding
from ggraph.errors import Error

from . import targets

VECTORS = ("sse4.2", "avx", "avx2", "fma", "f16c", "avxvnni", "avx512f", "avx512vnni", "avx512bf16", "amx-int8", "neon", "dotprod",
           "i8mm", "sve")


def diagnose() -> Iterator[Finding]:
    have = llvm.get_host_cpu_features()
    yield Finding("cpu", "processor", f"{llvm.get_host_cpu_name()} ({platform.machine()})")
    yield Finding("cpu", "vectors", " ".join(f for f in VECTORS if have.get(f)) or "none that kernels ask for")
    yield _lowering()
    major, minor, patch = llvm.llvm_version_info
    yield Finding("cpu", "compiler", f"Numba {numba.__version__}, llvmlite {llvmlite.__version__}, LLVM {major}.{minor}.{patch}")


def _lowering() -> Finding:
    try:
        chosen = targets.current().lowering
    except Error as e:
        return Finding("cpu", "lowering", str(e), "broken", "unset GGRAPH_CPU")
    slow = chosen == "generic" and targets.runnable() == ["generic"]
    return Finding("cpu", "lowering", chosen + (": no vector instructions that kernels know, so it is slow" if slow else
                                                f" (of {', '.join(targets.runnable())})"))
