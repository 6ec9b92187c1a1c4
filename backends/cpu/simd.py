"""The vector vocabulary of all CPU kernels, lowered per target.

Comes in: calls in kernel code. Goes out: LLVM instructions for the target that `targets.current()` names.
Must not know: tensors, types of weights, threads.

Vectors have 16 lanes (`f32x16`, `i32x16`, masks `i1x16`) or are bytes (`i8x64`, `i8x16`); where registers are smaller
LLVM splits them. `+ - * / & | ^ << >> < <= > >= == !=` work lane by lane, and a number beside a vector is spread.
`>>` keeps the sign of i32 and shifts zeros into bytes. Nothing is reordered or fused unless `fma` says so: a kernel
gives the same bits wherever it runs with the same lowering.

Addresses are integers and need no alignment. `get_*`/`put_*` move one element, `load_*`/`store_*` 16 elements, and
`*_n` the first n <= 16 (other lanes are 0), always computing in f32 or i32. In a parameter block `word(p, i)` is the
i-th int64 and `f32(p, i)` the float32 whose bits are its low half.
"""
from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.typing.templates import Signature

from . import targets
from .vector import (
    F32,
    HALF,
    I1,
    I8,
    I16,
    I32,
    I64,
    Builder,
    Value,
    Vec,
    call,
    const,
    dispatcher,
    f32x16,
    i1x16,
    i8x16,
    i8x64,
    i32x16,
    op,
    pointer,
    same,
    shuffle,
    spread,
    to_llvm,
)

__all__ = ["dispatcher", "to_llvm"]        # for `kernel`; the vocabulary is everything below

_V16 = {t: ir.VectorType(t, 16) for t in (I1, I8, I16, I32, HALF, F32)}
_intp, _f32, _void = types.intp, types.float32, types.void


# f16 and bf16: conversions of a scalar or a vector. `bits` is i16.

def _like(x: Value, lane: Any) -> Any:
    return ir.VectorType(lane, x.type.count) if isinstance(x.type, ir.VectorType) else lane


def _f16_to_f32(b: Builder, bits: Value) -> Value:
    i32, f32 = _like(bits, I32), _like(bits, F32)
    if targets.current().lowering != "generic":
        return b.fpext(b.bitcast(bits, _like(bits, HALF)), f32)
    # The plain instruction would be a call into a compiler library. Exponents differ by 112: scale, so that subnormals
    # come out right; infinity and NaN keep an all-ones exponent.
    h = b.zext(bits, i32)
    magnitude = b.shl(b.and_(h, const(i32, 0x7FFF)), const(i32, 13))
    scaled = b.fmul(b.bitcast(magnitude, f32), const(f32, 2.0 ** 112))
    special = b.icmp_unsigned(">=", magnitude, const(i32, 0x7C00 << 13))
    finite = b.bitcast(scaled, i32)
    whole = b.select(special, b.or_(magnitude, const(i32, 0x7F800000)), finite)
    return b.bitcast(b.or_(whole, b.shl(b.and_(h, const(i32, 0x8000)), const(i32, 16))), f32)


def _f32_to_f16(b: Builder, x: Value) -> Value:
    i16, i32, f32 = _like(x, I16), _like(x, I32), _like(x, F32)
    if targets.current().lowering != "generic":
        return b.bitcast(b.fptrunc(x, _like(x, HALF)), i16)
    bits = b.bitcast(x, i32)
    sign = b.and_(b.lshr(bits, const(i32, 16)), const(i32, 0x8000))
    m = b.and_(bits, const(i32, 0x7FFFFFFF))
    # Normal: rebias the exponent and round to nearest even on 13 bits. Subnormal: adding 0.5 lines the value up at the
    # last bit of f16 and the adder rounds. From 65520 on infinity; NaN stays NaN.
    odd = b.and_(b.lshr(m, const(i32, 13)), const(i32, 1))
    normal = b.lshr(b.add(b.sub(m, const(i32, (112 << 23) - 0xFFF)), odd), const(i32, 13))
    small = b.sub(b.bitcast(b.fadd(b.bitcast(m, f32), const(f32, 0.5)), i32), const(i32, 0x3F000000))
    h = b.select(b.icmp_unsigned("<", m, const(i32, 113 << 23)), small, normal)
    h = b.select(b.icmp_unsigned(">=", m, const(i32, 0x477FF000)), const(i32, 0x7C00), h)
    h = b.select(b.icmp_unsigned(">", m, const(i32, 0x7F800000)), const(i32, 0x7E00), h)
    return b.trunc(b.or_(h, sign), i16)


def _bf16_to_f32(b: Builder, bits: Value) -> Value:
    i32 = _like(bits, I32)
    return b.bitcast(b.shl(b.zext(bits, i32), const(i32, 16)), _like(bits, F32))


def _f32_to_bf16(b: Builder, x: Value) -> Value:
    i32 = _like(x, I32)
    bits = b.bitcast(x, i32)
    upper = b.lshr(bits, const(i32, 16))
    rounded = b.lshr(b.add(b.add(bits, const(i32, 0x7FFF)), b.and_(upper, const(i32, 1))), const(i32, 16))
    nan = b.fcmp_unordered("uno", x, x)
    return b.trunc(b.select(nan, b.or_(upper, const(i32, 64)), rounded), _like(x, I16))


# Memory. One row per element type: how it lies in memory, and to and from what kernels compute with.

def _same_value(b: Builder, x: Value) -> Value:
    return x


def _sext(b: Builder, x: Value) -> Value:
    return b.sext(x, _like(x, I32))


def _zext(b: Builder, x: Value) -> Value:
    return b.zext(x, _like(x, I32))


def _trunc8(b: Builder, x: Value) -> Value:
    return b.trunc(x, _like(x, I8))


def _trunc16(b: Builder, x: Value) -> Value:
    return b.trunc(x, _like(x, I16))


def _memory(lane: Any, vector: Vec, widen: Any, narrow: Any) -> tuple[Any, ...]:
    """The operations get, put, load, store, load_n, store_n for one element type."""
    memory = _V16[lane]
    size = lane.width // 8 if isinstance(lane, ir.IntType) else {HALF: 2, F32: 4}[lane]
    scalar = _f32 if vector is f32x16 else _intp
    cell = F32 if vector is f32x16 else I32

    def first(b: Builder, n: Value) -> Value:
        lanes = ir.Constant(_V16[I32], list(range(16)))
        return b.icmp_signed("<", lanes, spread(b, b.trunc(n, I32), 16))

    @op(scalar(_intp))
    def get(b: Builder, address: Value) -> Value:
        x = widen(b, b.load(pointer(b, address, lane), align=1))
        return x if cell is F32 else b.sext(x, I64)

    @op(_void(_intp, scalar))
    def put(b: Builder, address: Value, x: Value) -> None:
        b.store(narrow(b, x if cell is F32 else b.trunc(x, I32)), pointer(b, address, lane), align=1)

    @op(vector(_intp))
    def load(b: Builder, address: Value) -> Value:
        return widen(b, b.load(pointer(b, address, memory), align=1))

    @op(_void(_intp, vector))
    def store(b: Builder, address: Value, x: Value) -> None:
        b.store(narrow(b, x), pointer(b, address, memory), align=1)

    @op(vector(_intp, _intp))
    def load_n(b: Builder, address: Value, n: Value) -> Value:
        name = f"llvm.masked.load.v16{'f' if lane is F32 else 'i'}{8 * size}.p0"
        return widen(b, call(b, name, memory, pointer(b, address, memory), I32(1), first(b, n), const(memory, 0)))

    @op(_void(_intp, vector, _intp))
    def store_n(b: Builder, address: Value, x: Value, n: Value) -> None:
        name = f"llvm.masked.store.v16{'f' if lane is F32 else 'i'}{8 * size}.p0"
        call(b, name, ir.VoidType(), narrow(b, x), pointer(b, address, memory), I32(1), first(b, n))
    return get, put, load, store, load_n, store_n


(get_f32, put_f32, load_f32, store_f32, load_f32_n, store_f32_n) = _memory(F32, f32x16, _same_value, _same_value)
(get_f16, put_f16, load_f16, store_f16, load_f16_n, store_f16_n) = _memory(I16, f32x16, _f16_to_f32, _f32_to_f16)
(get_bf16, put_bf16, load_bf16, store_bf16, load_bf16_n, store_bf16_n) = _memory(
    I16, f32x16, _bf16_to_f32, _f32_to_bf16)
(get_i32, put_i32, load_i32, store_i32, load_i32_n, store_i32_n) = _memory(I32, i32x16, _same_value, _same_value)
(get_u16, put_u16, load_u16, store_u16, load_u16_n, store_u16_n) = _memory(I16, i32x16, _zext, _trunc16)
(get_i8, put_i8, load_i8, store_i8, load_i8_n, store_i8_n) = _memory(I8, i32x16, _sext, _trunc8)
(get_u8, put_u8, load_u8, store_u8, load_u8_n, store_u8_n) = _memory(I8, i32x16, _zext, _trunc8)


@op(_intp(_intp))
def get_i64(b: Builder, address: Value) -> Value:
    return b.load(pointer(b, address, I64), align=1)


@op(_void(_intp, _intp))
def put_i64(b: Builder, address: Value, x: Value) -> None:
    b.store(x, pointer(b, address, I64), align=1)


@op(_intp(_intp, _intp))
def word(b: Builder, p: Value, i: Value) -> Value:
    """The i-th int64 of the parameter block at `p`."""
    return b.load(b.gep(pointer(b, p, I64), [i]), align=8)


@op(_f32(_intp, _intp))
def f32(b: Builder, p: Value, i: Value) -> Value:
    """The i-th word of the parameter block as a float32 (its low half)."""
    return b.bitcast(b.trunc(b.load(b.gep(pointer(b, p, I64), [i]), align=8), I32), F32)


@op(i8x64(_intp))
def load_bytes(b: Builder, address: Value) -> Value:
    """64 bytes."""
    return b.load(pointer(b, address, i8x64.ir), align=1)


@op(_void(_intp, i8x64))
def store_bytes(b: Builder, address: Value, x: Value) -> None:
    b.store(x, pointer(b, address, i8x64.ir), align=1)


def emit_prefetch(b: Builder, address: Value, level: int = 2) -> None:
    args = pointer(b, address, I8), I32(0), I32(4 - level), I32(1)      # to be read; how near; data
    call(b, "llvm.prefetch.p0", ir.VoidType(), *args)


@op(_void(_intp))
def prefetch(b: Builder, address: Value) -> None:
    """Ask for a cache line, into the second level. Any address will do."""
    emit_prefetch(b, address)


@op(_void(_intp))
def prefetch_near(b: Builder, address: Value) -> None:
    """The same, into the first level."""
    emit_prefetch(b, address, level=1)


# Making vectors.

def _spreads(ty: Vec) -> Any:
    @op(ty(types.float32 if ty.float else types.int32 if ty is i32x16 else types.int8))
    def splat(b: Builder, x: Value) -> Value:
        return spread(b, x, ty.n)
    return splat


splat_f32, splat_i32, splat_i8 = _spreads(f32x16), _spreads(i32x16), _spreads(i8x64)


@op(i8x64(_intp))
def spread4(b: Builder, address: Value) -> Value:
    """The 4 bytes at the address in every lane of 4."""
    return b.bitcast(spread(b, b.load(pointer(b, address, I32), align=1), 16), i8x64.ir)


def table(*values: int) -> Any:
    """A constant of 16 bytes for `lookup`: `t = table(...)` outside of kernels, `t()` inside."""
    @op(i8x16())
    def constant(b: Builder) -> Value:
        return ir.Constant(i8x16.ir, list(values))
    return constant


def data(content: bytes) -> Any:
    """Constant bytes within the kernel: `d = data(...)` outside of kernels, `d()` inside is their address."""
    @op(_intp())
    def address(b: Builder) -> Value:
        ty, name = ir.ArrayType(I8, len(content)), f"data.{hashlib.sha256(content).hexdigest()}"
        known = b.module.globals.get(name) or ir.GlobalVariable(b.module, ty, name)
        known.initializer, known.global_constant = ir.Constant(ty, bytearray(content)), True
        known.linkage = "linkonce_odr"
        return b.ptrtoint(known, I64)
    return address


@op(i32x16())
def iota(b: Builder) -> Value:
    """0, 1, ... 15."""
    return ir.Constant(_V16[I32], list(range(16)))


# Arithmetic.

def emit_fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    if targets.current().lowering == "generic":                   # without the instruction LLVM would call libm
        return b.fadd(b.fmul(x, y), z)
    return call(b, f"llvm.fma.v{x.type.count}f32", x.type, x, y, z)


@op(same)
def fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    """x * y + z, rounded once (twice on the generic target)."""
    return emit_fma(b, x, y, z)


def _pick(b: Builder, sign: str, x: Value, y: Value) -> Value:
    is_float = x.type.element == F32
    return b.select(b.fcmp_ordered(sign, x, y) if is_float else b.icmp_signed(sign, x, y), x, y)


@op(same)
def maximum(b: Builder, x: Value, y: Value) -> Value:
    """Larger of each lane; where one is NaN: y."""
    return _pick(b, ">", x, y)


@op(same)
def minimum(b: Builder, x: Value, y: Value) -> Value:
    """Smaller of each lane; where one is NaN: y."""
    return _pick(b, "<", x, y)


def _unary(name: str) -> Callable[[Builder, Value], Value]:
    def emit(b: Builder, x: Value) -> Value:
        return call(b, f"llvm.{name}.v{x.type.count}f32", x.type, x)
    return emit


sqrt, floor, absolute = op(same)(_unary("sqrt")), op(same)(_unary("floor")), op(same)(_unary("fabs"))
nearest = op(same)(_unary("roundeven"))


@op(lambda m, x, y: (sig := same(x, y)) and sig.return_type(m, *sig.args))
def select(b: Builder, mask: Value, x: Value, y: Value) -> Value:
    """x where the mask holds, else y."""
    return b.select(mask, x, y)


@op(f32x16(i32x16))
def to_f32(b: Builder, x: Value) -> Value:
    return b.sitofp(x, _V16[F32])


@op(i32x16(f32x16))
def to_i32(b: Builder, x: Value) -> Value:
    """Towards zero; |x| < 2^31."""
    return b.fptosi(x, _V16[I32])


@op(f32x16(i32x16))
def as_f32(b: Builder, x: Value) -> Value:
    """The same bits."""
    return b.bitcast(x, _V16[F32])


@op(i32x16(f32x16))
def as_i32(b: Builder, x: Value) -> Value:
    """The same bits."""
    return b.bitcast(x, _V16[I32])


@op(_f32(types.int32))
def bits_f32(b: Builder, x: Value) -> Value:
    """The float32 with these bits."""
    return b.bitcast(x, F32)


# Across lanes, always as the same tree: halves are folded together until one lane is left.

def _fold(b: Builder, x: Value, join: Callable[[Value, Value], Value]) -> Value:
    while x.type.count > 1:
        half = x.type.count // 2
        x = join(shuffle(b, x, list(range(half))), shuffle(b, x, list(range(half, 2 * half))))
    return b.extract_element(x, I32(0))


def _to_lane(x: Any) -> Signature | None:
    return {f32x16: _f32, i32x16: types.int32}[x](x) if x in (f32x16, i32x16) else None


@op(_to_lane)
def hsum(b: Builder, x: Value) -> Value:
    """Sum of all lanes."""
    return _fold(b, x, b.fadd if x.type.element == F32 else b.add)


@op(_to_lane)
def hmax(b: Builder, x: Value) -> Value:
    """Largest lane."""
    return _fold(b, x, lambda y, z: _pick(b, ">", y, z))


@op(types.boolean(i1x16))
def any_lane(b: Builder, mask: Value) -> Value:
    """Whether the mask holds somewhere."""
    return b.icmp_unsigned("!=", b.bitcast(mask, I16), I16(0))


# Bytes.

def _halves(b: Builder, x: Value, parts: int) -> list[Value]:
    n = x.type.count // parts
    return [shuffle(b, x, list(range(i * n, i * n + n))) for i in range(parts)]


def _join(b: Builder, parts: list[Value]) -> Value:
    while len(parts) > 1:
        parts = [shuffle(b, x, list(range(2 * x.type.count)), y) for x, y in zip(parts[::2], parts[1::2])]
    return parts[0]


def _dpbusd(b: Builder, acc: Value, u: Value, s: Value) -> Value:
    name = f"llvm.x86.avx512.vpdpbusd.{32 * acc.type.count}"
    return call(b, name, acc.type, acc, b.bitcast(u, acc.type), b.bitcast(s, acc.type))


def _madd_words(b: Builder, acc: Value, u: Value, s: Value) -> Value:
    """AVX2. The byte multiply saturates, so even and odd bytes are widened to 16 bits first."""
    words = ir.VectorType(I16, 16)
    u, s, eight = b.bitcast(u, words), b.bitcast(s, words), const(words, 8)
    even = call(b, "llvm.x86.avx2.pmadd.wd", acc.type, b.and_(u, const(words, 255)), b.ashr(b.shl(s, eight), eight))
    odd = call(b, "llvm.x86.avx2.pmadd.wd", acc.type, b.lshr(u, eight), b.ashr(s, eight))
    return b.add(acc, b.add(even, odd))


def _madd_bytes(b: Builder, acc: Value, u: Value, s: Value) -> Value:
    """AVX2, u <= 127: two products of bytes fit in 16 bits (2 * 127 * 128 < 2^15), so nothing saturates."""
    words = call(b, "llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(I16, 16), u, s)
    return b.add(acc, call(b, "llvm.x86.avx2.pmadd.wd", acc.type, words, const(words.type, 1)))


def _sdot(b: Builder, acc: Value, x: Value, y: Value) -> Value:
    return call(b, "llvm.aarch64.neon.sdot.v4i32.v16i8", acc.type, acc, x, y)


def _sdot_flipped(b: Builder, acc: Value, u: Value, s: Value) -> Value:
    """NEON has no mixed product: u = (u - 128) + 128, and u - 128 is u with its top bit flipped."""
    flipped = b.xor(u, const(u.type, 128))
    sums = _sdot(b, const(acc.type, 0), const(u.type, 1), s)
    return b.add(_sdot(b, acc, flipped, s), b.shl(sums, const(acc.type, 7)))


def _multiply_add(b: Builder, acc: Value, u: Value, s: Value) -> Value:
    for k in range(4):
        lanes = list(range(k, 64, 4))
        acc = b.add(acc, b.mul(b.zext(shuffle(b, u, lanes), acc.type), b.sext(shuffle(b, s, lanes), acc.type)))
    return acc


_DOT4 = {"avx512vnni": (1, _dpbusd), "avxvnni": (2, _dpbusd), "avx2": (2, _madd_words), "neon": (4, _sdot_flipped),
         "generic": (1, _multiply_add)}
_DOT4_SMALL = {**_DOT4, "avx2": (2, _madd_bytes), "neon": (4, _sdot)}


def emit_dot4(b: Builder, acc: Value, u: Value, s: Value, small: bool) -> Value:
    parts, emit = (_DOT4_SMALL if small else _DOT4)[targets.current().lowering]
    return _join(b, [emit(b, *xs) for xs in zip(*(_halves(b, x, parts) for x in (acc, u, s)))])


@op(i32x16(i32x16, i8x64, i8x64))
def dot4(b: Builder, acc: Value, u: Value, s: Value) -> Value:
    """acc + the sum over each 4 bytes of u (unsigned) times s (signed). Exact."""
    return emit_dot4(b, acc, u, s, False)


@op(i32x16(i32x16, i8x64, i8x64))
def dot4_small(b: Builder, acc: Value, u: Value, s: Value) -> Value:
    """`dot4` where u <= 127: exact too, and cheaper on some targets."""
    return emit_dot4(b, acc, u, s, True)


def _lookup_part(b: Builder, table: Value, index: Value) -> Value:
    lowering, n = targets.current().lowering, index.type.count
    if lowering == "generic":
        out = const(index.type, 0)
        for i in range(16):
            entry = spread(b, b.extract_element(table, I32(i)), n)
            out = b.select(b.icmp_unsigned("==", index, const(index.type, i)), entry, out)
        return out
    if lowering == "neon":
        return call(b, "llvm.aarch64.neon.tbl1.v16i8", index.type, table, index)
    name = {64: "llvm.x86.avx512.pshuf.b.512", 32: "llvm.x86.avx2.pshuf.b"}[n]
    return call(b, name, index.type, shuffle(b, table, list(range(16)) * (n // 16)), index)


@op(i8x64(i8x16, i8x64))
def lookup(b: Builder, table: Value, index: Value) -> Value:
    """table[index] for 64 indices 0..15."""
    parts = {"avx512vnni": 1, "generic": 1, "neon": 4}.get(targets.current().lowering, 2)
    return _join(b, [_lookup_part(b, table, x) for x in _halves(b, index, parts)])


# What a kernel may tell the executor, and ask it.

def _shared(b: Builder, name: str) -> Value:
    known = b.module.globals.get(name)
    return known or ir.GlobalVariable(b.module, I64, name)


@op(_void(_intp))
def fail(b: Builder, code: Value) -> None:
    """Report error `code` (> 0); the first report wins, and the run ends at the next barrier. Then return."""
    b.cmpxchg(_shared(b, "ggraph_error"), I64(0), code, "seq_cst", "seq_cst")


@op(types.boolean())
def aborted(b: Builder) -> Value:
    """Whether the run shall stop; a long kernel may ask now and then and return early."""
    return b.icmp_unsigned("!=", b.load_atomic(_shared(b, "ggraph_abort"), "monotonic", 8), I64(0))
