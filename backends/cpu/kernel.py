"""`@kernel`: a Python function `k(p, ith, nth)` becomes native code with an address.

Comes in: functions written with `simd`. Goes out: Kernel objects whose `.address` is a C function
`void(int64 p, int64 ith, int64 nth)`: the parameter block's address, the thread's index and the number of threads.
Must not know: plans, threads, tensors.

Numba only translates to LLVM IR; target, optimisation, object code and loading are ours. So a kernel that is in the
cache needs no Numba at all, and `simd` (which is Numba) is a module that loads on first use. Nothing of Python is
linked into a kernel: it reports failures with `simd.fail(code)`, and an exception in it counts as code -1.

    @kernel                               @template                         @inline
    def scale(p, ith, nth):               def unary(op):                    def rows(p, i): ...
        ...                                   def k(p, ith, nth): ...
                                              return k
    scale.address                         unary("silu").address             callable from kernels
"""
from __future__ import annotations

import functools
import importlib.util
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import llvmlite.binding as llvm

from . import cache, control, targets
from .targets import Target

Body = Callable[[Any, Any, Any], None]
Function = TypeVar("Function", bound=Callable[..., Any])
_lock = threading.RLock()
_engines: dict[Target, llvm.ExecutionEngine] = {}


def _lazy(name: str) -> Any:
    """The module `name` of this backend, whose code runs when an attribute is first read."""
    name = f"{__package__}.{name}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    assert spec and spec.loader
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


simd, vmath, atomic, tile, stage = map(_lazy, ("simd", "vmath", "atomic", "tile", "stage"))


class Kernel:
    """Native code, made on first use. `source` is the decorated function: its module's imports hold all that the code
    is made of. `args` are those of a template. The name is unique, and names the cached object."""

    def __init__(self, source: Callable[..., Any], build: Callable[[], Body], args: tuple[Any, ...] | None = None):
        self.module, self.attribute, self.args, self._build = source.__module__, source.__qualname__, args, build
        self.name = "-".join([f"{self.module.rpartition('.')[2]}.{self.attribute}", *map(str, args or ())])
        self._addresses: dict[Target, int] = {}

    @property
    def address(self) -> int:
        """Address of the compiled function: from this process, from the cache, or compiled now."""
        target = targets.current()
        if target not in self._addresses:
            with _lock:
                self._addresses[target] = _link(self.name, self._object(target), target)
        return self._addresses[target]

    @property
    def cached(self) -> bool:
        """Whether `address` needs no compiling."""
        target = targets.current()
        return target in self._addresses or cache.load(cache.file(self.name, self.module, target)) is not None

    def assembly(self, target: Target) -> str:
        """The code for any target, also one that cannot run here."""
        with _lock, targets.using(target):
            machine = targets.machine(target, jit=False)
            return str(machine.emit_assembly(_module(self.name, self._build(), machine)))

    def store(self) -> None:
        """See to it that the cache has the object code."""
        self._object(targets.current())

    def _object(self, target: Target) -> bytes:
        file = cache.file(self.name, self.module, target)
        code = cache.load(file)
        if code is None:
            machine = targets.machine(target)
            code = machine.emit_object(_module(self.name, self._build(), machine))
            cache.store(file, code)
        return code

    def __repr__(self) -> str:
        return f"<kernel {self.name}>"


def kernel(fn: Body) -> Kernel:
    """Decorator: the function as a Kernel."""
    return Kernel(fn, lambda: fn)


def template(build: Callable[..., Body]) -> Callable[..., Kernel]:
    """Decorator: `build(*args)` returns a body; the result maps args to one Kernel each. Args must print stably."""
    @functools.cache
    def make(*args: Any) -> Kernel:
        return Kernel(build, lambda: build(*args), args)
    return make


class _Inline:
    """What Numba sees of a function that kernels call: `_numba_type_`."""

    def __init__(self, fn: Callable[..., Any]):
        self.fn, self.__name__, self.__doc__ = fn, fn.__name__, fn.__doc__
        self._dispatchers: dict[Target, Any] = {}

    @property
    def _numba_type_(self) -> Any:
        target = targets.current()                      # operations inside lower differently per target
        if target not in self._dispatchers:
            self._dispatchers[target] = simd.dispatcher(self.fn)
        return self._dispatchers[target]._numba_type_


def inline(fn: Function) -> Function:
    """Decorator: a function that kernels can call; always inlined, never run by Python."""
    return cast(Function, _Inline(fn))


def _module(name: str, body: Body, machine: llvm.TargetMachine) -> llvm.ModuleRef:
    """Optimised LLVM module with one exported function, called `name`."""
    for lazy_module in (simd, vmath, atomic, tile, stage):
        _ = lazy_module.__doc__                         # Numba must know all operations before it starts
    text, entry = simd.to_llvm(body)
    module = _parse(text, machine)
    module.link_in(_parse(_ENTRY.format(name=name, entry=entry), machine))
    for fn in module.functions:
        if not fn.is_declaration and fn.name != name:
            fn.linkage = llvm.Linkage.internal
    for variable in module.global_variables:
        if not variable.is_declaration:
            variable.linkage = llvm.Linkage.internal
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    builder = llvm.create_pass_builder(machine, tuning)
    builder.getModulePassManager().run(module, builder)
    foreign = [f.name for f in module.functions
               if f.is_declaration and f.name.startswith(("Py", "_Py", "numba_", "NRT_"))]
    assert not foreign, f"kernel {name} calls Python ({', '.join(foreign)})"
    module.verify()
    return module


def _parse(text: str, machine: llvm.TargetMachine) -> llvm.ModuleRef:
    """The text as a module for `machine`, whatever host it was written on."""
    head = ("target triple", "target datalayout")
    lines = [line for line in text.splitlines() if not line.startswith(head)]
    module = llvm.parse_assembly("\n".join([f'target datalayout = "{machine.target_data}"',
                                            f'target triple = "{machine.triple}"', *lines]))
    return module


# Numba's calling convention: status <- (return value*, exception*, arguments...); 0 and -2 (None) are success.
_ENTRY = """
@ggraph_error = external global i64
declare i32 @"{entry}"(ptr, ptr, i64, i64, i64)
define void @"{name}"(i64 %p, i64 %ith, i64 %nth) {{
  %value = alloca ptr
  %exception = alloca ptr
  %status = call i32 @"{entry}"(ptr %value, ptr %exception, i64 %p, i64 %ith, i64 %nth)
  switch i32 %status, label %raised [ i32 0, label %done  i32 -2, label %done ]
raised:
  %was = cmpxchg ptr @ggraph_error, i64 0, i64 -1 seq_cst seq_cst
  br label %done
done:
  ret void
}}
"""


def _link(name: str, code: bytes, target: Target) -> int:
    """Load object code into this process; the address of its function `name`."""
    control.publish()                                   # LLVM ends the process when a symbol is missing
    if target not in _engines:
        empty = llvm.parse_assembly(f'target triple = "{target.triple}"')
        _engines[target] = llvm.create_mcjit_compiler(empty, targets.machine(target))
    engine = _engines[target]
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return int(engine.get_function_address(name))
