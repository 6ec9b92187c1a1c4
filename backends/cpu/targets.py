"""Which instructions a kernel is lowered to: the host's best, or what GGRAPH_CPU asks for.

Comes in: the host's features as LLVM reports them. Goes out: a Target (lowering name, LLVM triple, cpu, features).
Must not know: what kernels compute, where objects are kept.

`current()` is read by the intrinsics of `simd` while a kernel compiles; `using(target)` compiles for another target,
which is how lowerings that this machine cannot run are still checked in the assembly.
"""
from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import llvmlite.binding as llvm

from ggraph import env
from ggraph.errors import BackendError

llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()


class Target(NamedTuple):
    """`lowering` selects code in `simd`; the rest is what LLVM needs to know."""
    lowering: str
    triple: str
    cpu: str
    features: str

    def has(self, feature: str) -> bool:
        """Whether LLVM may use these instructions, beyond those that the lowering is named for."""
        return f"+{feature}" in self.features.split(",")

    @property
    def x86(self) -> bool:
        return self.triple.startswith("x86_64")


_AVX2 = ("avx2", "fma", "f16c", "bmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni")
_NEEDS = {"avx512vnni": _AVX512, "avxvnni": (*_AVX2, "avxvnni"), "avx2": _AVX2, "neon": ("neon", "dotprod"),
          "generic": ()}                                                           # best first
_X86, _ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"

# Each lowering on the least machine that has it.
LEAST = {
    "avx512vnni": Target("avx512vnni", _X86, "x86-64-v4", "+avx512vnni"),
    "avxvnni": Target("avxvnni", _X86, "x86-64-v3", "+avxvnni"),
    "avx2": Target("avx2", _X86, "x86-64-v3", ""),
    "neon": Target("neon", _ARM, "generic", "+neon,+dotprod"),
    "generic": Target("generic", _X86, "x86-64", ""),
}
_stack: list[Target] = []


@lru_cache(maxsize=1)
def _host_features() -> dict[str, bool]:
    return dict(llvm.get_host_cpu_features())


def runnable() -> list[str]:
    """Lowerings that this machine can run, best first; the last is always "generic"."""
    have = _host_features()
    apple = sys.platform == "darwin" and llvm.get_process_triple().startswith("arm64")   # all have dotprod
    return [name for name, needs in _NEEDS.items() if all(have.get(f) for f in needs) or (apple and name == "neon")]


@lru_cache(maxsize=8)
def host(lowering: str = "") -> Target:
    """The target to run on: `lowering`, or the best one. BackendError when this machine cannot run it."""
    known = runnable()
    name = lowering or known[0]
    if name not in known:
        raise BackendError(f"GGRAPH_CPU={name} cannot run on this machine; it can run {', '.join(known)}")
    triple = llvm.get_process_triple()
    if name == known[0]:
        return Target(name, triple, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())
    if not triple.startswith("x86_64"):
        return Target(name, triple, "generic", "")
    return LEAST[name]._replace(triple=triple)


def current() -> Target:
    """The target that kernels compile for now."""
    return _stack[-1] if _stack else host(env.get("GGRAPH_CPU"))


@contextlib.contextmanager
def using(target: Target) -> Iterator[None]:
    """Compile for `target` inside the block (one thread at a time)."""
    _stack.append(target)
    try:
        yield
    finally:
        _stack.pop()


def machine(target: Target, jit: bool = True) -> llvm.TargetMachine:
    """LLVM's code generator for `target`."""
    return llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.features, opt=3, codemodel="jitdefault" if jit else "default", jit=jit)
