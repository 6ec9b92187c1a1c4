"""Vectors as Numba types: what `simd` is written with.

Comes in: LLVM-building functions. Goes out: vector types, operators on them, and `op`, which turns such a function
into something that kernels call. Must not know: targets, kernels, instructions.

A vector is an LLVM vector and lives in registers. Where a vector is asked for, a number is spread over all lanes.
"""
from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import compiler, registry
from numba.core.codegen import CPUCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.imputils import lower_builtin, lower_cast
from numba.core.registry import CPUDispatcher
from numba.core.typing.templates import AbstractTemplate, Signature, infer_global
from numba.extending import intrinsic, models, register_model

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
HALF, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
_ELEMENTS = {"i1": I1, "i8": I8, "i16": I16, "i32": I32, "i64": I64, "f32": F32, "f64": F64}
Builder = Any
Value = Any


class Vec(types.Type):
    """`n` lanes of `elem`."""

    def __init__(self, elem: str, n: int):
        self.elem, self.n = elem, n
        super().__init__(name=f"{elem}x{n}")

    @property
    def ir(self) -> ir.VectorType:
        return ir.VectorType(_ELEMENTS[self.elem], self.n)

    @property
    def float(self) -> bool:
        return self.elem[0] == "f"


@register_model(Vec)
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Vec):
        super().__init__(dmm, fe_type, fe_type.ir)


f32x16, i32x16, i1x16, i8x64, i8x16 = Vec("f32", 16), Vec("i32", 16), Vec("i1", 16), Vec("i8", 64), Vec("i8", 16)


# Building blocks for code generation.

def const(ty: Any, value: Any) -> ir.Constant:
    """`value` in every lane of a vector type, or as a scalar."""
    return ir.Constant(ty, [value] * ty.count if isinstance(ty, ir.VectorType) else value)


def shuffle(b: Builder, x: Value, lanes: list[int], y: Value = None) -> Value:
    """Lanes of `x` (and from x.count on those of `y`) in a new order."""
    y = ir.Constant(x.type, ir.Undefined) if y is None else y
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def spread(b: Builder, x: Value, n: int) -> Value:
    """A scalar in all `n` lanes."""
    vector = ir.Constant(ir.VectorType(x.type, n), ir.Undefined)
    return shuffle(b, b.insert_element(vector, x, I32(0)), [0] * n)


def call(b: Builder, name: str, result: Any, *args: Value) -> Value:
    """Call an LLVM intrinsic or a C function by its name."""
    fnty = ir.FunctionType(result, [a.type for a in args])
    return b.call(b.module.globals.get(name) or ir.Function(b.module, fnty, name), args)


def pointer(b: Builder, address: Value, ty: Any) -> Value:
    return b.inttoptr(address, ty.as_pointer())


def at(b: Builder, address: Value, offset: int) -> Value:
    return b.add(address, I64(offset)) if offset else address


# Defining operations.

Types = Callable[..., "Signature | None"]


def op(signature: Signature | Types) -> Callable[[Callable[..., Value]], Any]:
    """Decorator: `emit(b, *args)` builds LLVM for a call in a kernel. `signature` is fixed, or made from the types
    of the arguments (None: not for these)."""
    def decorate(emit: Callable[..., Value]) -> Any:
        def typer(typingctx: Any, *args: Any) -> Any:
            sig = signature if isinstance(signature, Signature) else signature(*args)
            return sig and (sig, codegen)

        def codegen(context: Any, builder: Builder, sig: Signature, args: Any) -> Value:
            value = emit(builder, *args)
            return context.get_dummy_value() if sig.return_type is types.void else value
        first = inspect.Parameter("typingctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        rest = list(inspect.signature(emit).parameters.values())[1:]
        typer.__name__, typer.__doc__ = emit.__name__, emit.__doc__
        typer.__signature__ = inspect.Signature([first, *rest])     # type: ignore[attr-defined]
        return intrinsic(typer)
    return decorate


def same(*args: Any) -> Signature | None:
    """Type rule: all arguments and the result are one vector type; numbers among them are spread."""
    vectors = {a for a in args if isinstance(a, Vec)}
    if len(vectors) != 1:
        return None
    ty = vectors.pop()
    return ty(*[ty] * len(args))


def _compare(*args: Any) -> Signature | None:
    sig = same(*args)
    return sig and Vec("i1", sig.return_type.n)(*sig.args)


def _lower(name: str, symbol: str = "") -> Callable[..., Value]:
    """The builder's method for an operator: float or integer form after the lanes' type."""
    def emit(b: Builder, *args: Value) -> Value:
        is_float = args[0].type.element in (F32, F64)
        if symbol:
            return b.fcmp_ordered(symbol, *args) if is_float else b.icmp_signed(symbol, *args)
        return getattr(b, "f" + name if is_float else _INTEGER.get(name, name))(*args)
    return emit


def _shift_right(b: Builder, x: Value, n: Value) -> Value:
    return b.lshr(x, n) if x.type.element == I8 else b.ashr(x, n)           # bytes are unsigned here


_INTEGER = {"div": "sdiv"}
_OPERATORS = [(operator.add, same, _lower("add")), (operator.sub, same, _lower("sub")),
              (operator.mul, same, _lower("mul")), (operator.truediv, same, _lower("div")),
              (operator.and_, same, _lower("and_")), (operator.or_, same, _lower("or_")),
              (operator.xor, same, _lower("xor")), (operator.lshift, same, _lower("shl")),
              (operator.rshift, same, _shift_right), (operator.neg, same, _lower("neg"))]
_OPERATORS += [(f, _compare, _lower("", s)) for f, s in
               ((operator.lt, "<"), (operator.le, "<="), (operator.gt, ">"), (operator.ge, ">="),
                (operator.eq, "=="), (operator.ne, "!="))]


def _register(fn: Any, rule: Types, emit: Callable[..., Value]) -> None:
    @infer_global(fn)
    class _Template(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            return rule(*args)

    def lower(context: Any, builder: Builder, sig: Signature, args: Any) -> Value:
        return emit(builder, *args)
    for arity in (1, 2):
        lower_builtin(fn, *[Vec] * arity)(lower)


for _fn, _rule, _emit in _OPERATORS:
    _register(_fn, _rule, _emit)
_register(operator.iadd, same, _lower("add"))


@lower_cast(types.Number, Vec)
def _spread_number(context: Any, builder: Builder, fromty: Any, toty: Vec, value: Value) -> Value:
    lane = {"i1": types.boolean, "i8": types.int8, "i16": types.int16, "i32": types.int32, "i64": types.int64,
            "f32": types.float32, "f64": types.float64}[toty.elem]
    return spread(builder, context.cast(builder, value, fromty, lane), toty.n)


# What `kernel` needs of Numba: translation, nothing else. LLVM runs once, over the whole kernel and for the kernel's
# own target; Numba's engine would compile each called function for this machine.

class _Library(CPUCodeLibrary):
    """The LLVM module of one function and of what it calls, as translated."""

    def finalize(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True

    def _optimize_functions(self, module: Any) -> None:
        pass


def _translate(fn: Callable[..., Any], args: Any, return_type: Any) -> Any:
    target, flags = registry.cpu_target, compiler.Flags()
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.enable_pyobject = flags.force_pyobject = flags.enable_looplift = False
    flags.error_model = "numpy"                                   # no exception for a division by zero
    flags.nrt, flags.forceinline = False, True
    library = _Library(target.target_context.codegen(), fn.__qualname__)
    return compiler.compile_extra(target.typing_context, target.target_context, fn, args, return_type, flags, {},
                                  library)


class _Dispatcher(CPUDispatcher):
    """A called function, translated for each combination of types."""

    def __init__(self, fn: Callable[..., Any]):
        super().__init__(fn, targetoptions={"nopython": True})
        self._compiler._compile_core = lambda args, return_type: _translate(fn, args, return_type)

    def add_overload(self, result: Any) -> None:
        key = object()                                            # stands for the compiled entry point
        registry.cpu_target.target_context.insert_user_function(key, result.fndesc, [result.library])
        self.overloads[tuple(result.signature.args)] = result._replace(entry_point=key)


def dispatcher(fn: Callable[..., Any]) -> Any:
    """A function that kernels may call, as Numba wants it."""
    return _Dispatcher(fn)


def to_llvm(body: Callable[..., None]) -> tuple[str, str]:
    """A kernel body as LLVM assembly with all it calls, not optimised, and the name of its function."""
    with global_compiler_lock:
        result = _translate(body, (types.intp,) * 3, types.void)
        result.library.finalize()
    return str(result.library._final_module), result.fndesc.mangled_name
