"""What threads need beside `simd`: atomics, the clock, calls through an address, and system calls.

All atomics are sequentially consistent: they run once per step, not per element.
"""
from __future__ import annotations

import os

from llvmlite import ir
from numba import types

from . import targets
from .vector import I8, I32, I64, Builder, Value, call, op, pointer

_intp, _void = types.intp, types.void
_NT = os.name == "nt"
_YIELD, _READ, _WRITE = ("SwitchToThread", "_read", "_write") if _NT else ("sched_yield", "read", "write")


@op(_intp(_intp))
def load(b: Builder, address: Value) -> Value:
    return b.load_atomic(pointer(b, address, I64), "seq_cst", 8)


@op(_void(_intp, _intp))
def store(b: Builder, address: Value, x: Value) -> None:
    b.store_atomic(x, pointer(b, address, I64), "seq_cst", 8)


@op(_intp(_intp, _intp))
def add(b: Builder, address: Value, x: Value) -> Value:
    """The value before."""
    return b.atomic_rmw("add", pointer(b, address, I64), x, "seq_cst")


@op(_intp(_intp, _intp))
def swap(b: Builder, address: Value, x: Value) -> Value:
    """The value before."""
    return b.atomic_rmw("xchg", pointer(b, address, I64), x, "seq_cst")


@op(_void())
def pause(b: Builder) -> None:
    """Tell the core that this is a spin loop."""
    if targets.current().x86:
        call(b, "llvm.x86.sse2.pause", ir.VoidType())
    else:
        call(b, "llvm.aarch64.hint", ir.VoidType(), I32(1))


@op(_void())
def give_way(b: Builder) -> None:
    """Let another thread have the core, if one wants it."""
    call(b, _YIELD, I32)


@op(_intp())
def ticks(b: Builder) -> Value:
    """A steady clock; `pool` knows its rate."""
    return call(b, "llvm.readcyclecounter" if targets.current().x86 else "llvm.readsteadycounter", I64)


@op(_void(_intp, _intp, _intp, _intp))
def run(b: Builder, kernel: Value, p: Value, ith: Value, nth: Value) -> None:
    """Call the kernel at an address."""
    fnty = ir.FunctionType(ir.VoidType(), [I64, I64, I64])
    b.call(b.inttoptr(kernel, fnty.as_pointer()), [p, ith, nth])


@op(_void(_intp))
def sleep(b: Builder, fd: Value) -> None:
    """Wait for one byte from a pipe (again when a signal cut the wait short)."""
    byte = b.alloca(I8)
    loop, done = b.append_basic_block("sleep"), b.append_basic_block("awake")
    b.branch(loop)
    b.position_at_end(loop)
    n = call(b, _READ, I64, b.trunc(fd, I32), byte, I64(1))
    b.cbranch(b.icmp_signed("==", b.trunc(n, I32), I32(1)), done, loop)
    b.position_at_end(done)


@op(_void(_intp))
def wake(b: Builder, fd: Value) -> None:
    """Write one byte into a pipe."""
    byte = b.alloca(I8)
    b.store(I8(1), byte)
    call(b, _WRITE, I64, b.trunc(fd, I32), byte, I64(1))
