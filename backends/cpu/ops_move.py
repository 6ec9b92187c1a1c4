"""Moving data: rows by number, copies between layouts and types, joining, tiling, padding, rolling, triangles.

Comes in: nodes of these ops. Goes out: steps. Rows of one type become rows of another through a `_mover`; what does not
lie in rows is moved element by element. `as_rows` gives other lowerings any source as F32 rows.
"""
from __future__ import annotations

from collections.abc import Sequence

from ggraph import dtypes
from ggraph.dtypes import F32, I32, DType
from ggraph.tensor import Tensor, strides

from ..lowering import packed
from . import pack, unpack
from .join import by_tokens
from .kernel import Kernel, inline, simd, template
from .layout import (
    CHUNK,
    address,
    contiguous,
    f32_rows,
    in_rows,
    n_rows,
    nb,
    ne,
    row,
    shaped,
    share,
    unravel,
)
from .lower import Cuts, Emit, Field, lowers

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

BAD_ROW = 1             # error code of a kernel that met a row number outside its tensor
_FLOATS = {dtypes.F32: "f32", dtypes.F16: "f16", dtypes.BF16: "bf16"}
_ELEMENTS = {**_FLOATS, I32: "i32"}
_RAW = {8: "i64", 4: "i32", 2: "u16", 1: "u8"}       # bytes of an element -> how it moves as it is


# Rows of n elements, from one type to another.

@inline
def _move_bytes(src, dst, n):
    for _ in range(n >> 6):
        simd.store_bytes(dst, simd.load_bytes(src))
        src += 64
        dst += 64
    for _ in range((n & 63) >> 2):
        simd.put_i32(dst, simd.get_i32(src))
        src += 4
        dst += 4
    for _ in range(n & 3):
        simd.put_u8(dst, simd.get_u8(src))
        src += 1
        dst += 1


def _mover(src_type: DType, dst_type: DType):
    """f(src, dst, n), or None where there is none."""
    if src_type is dst_type:
        block, nbytes = src_type.block, src_type.nbytes
        return inline(lambda src, dst, n: _move_bytes(src, dst, n // block * nbytes))
    if src_type in _FLOATS and dst_type in _FLOATS:
        return _float_mover(src_type, dst_type)
    if dst_type is F32 and unpack.unpacks(src_type):
        return unpack.unpacker(src_type)
    if src_type is F32 and pack.packs(dst_type):
        return pack.packer(dst_type)
    return None


def _float_mover(src_type: DType, dst_type: DType):
    load, load_n = (getattr(simd, f"load_{_FLOATS[src_type]}{n}") for n in ("", "_n"))
    store, store_n = (getattr(simd, f"store_{_FLOATS[dst_type]}{n}") for n in ("", "_n"))
    a, b = 16 * src_type.nbytes, 16 * dst_type.nbytes

    @inline
    def f(src, dst, n):
        for _ in range(n >> 4):
            store(dst, load(src))
            src += a
            dst += b
        if n & 15:
            store_n(dst, load_n(src, n & 15), n & 15)
    return f


def _moves(src_type: DType, dst_type: DType) -> bool:
    return (src_type is dst_type or (src_type in _FLOATS and dst_type in _FLOATS)
            or (dst_type is F32 and unpack.unpacks(src_type)) or (src_type is F32 and pack.packs(dst_type)))


@template
def _copy(src, dst):
    """dst, src of one shape, rows"""
    move = _mover(dtypes.TYPES[src], dtypes.TYPES[dst])
    block, size, out_size = dtypes.TYPES[dst].block, dtypes.TYPES[src].nbytes, dtypes.TYPES[dst].nbytes
    src_block = dtypes.TYPES[src].block

    def k(p, ith, nth):
        n, rows = ne(p, 0, 0), n_rows(p, 0)
        if contiguous(p, 0, n // block * out_size) and contiguous(p, 1, n // src_block * size):
            n, rows = n * rows, 1
        chunks = (n + CHUNK - 1) // CHUNK
        first, last = share(rows * chunks, ith, nth)
        for i in range(first, last):
            r = i // chunks
            start = (i - r * chunks) * CHUNK
            i1, i2, i3 = unravel(p, 0, r)
            move(row(p, 1, i1, i2, i3) + start // src_block * size, row(p, 0, i1, i2, i3) + start // block * out_size,
                 min(n - start, CHUNK))
    return k


@template
def _scatter_elements(src, dst):
    """dst, src of one shape, any strides: blocks of 16 rows, along which the source may be contiguous"""
    get, put = getattr(simd, f"get_{src}"), getattr(simd, f"put_{dst}")

    def k(p, ith, nth):
        n1, n2 = ne(p, 0, 1), ne(p, 0, 2)
        blocks = (n1 + 15) // 16
        first, last = share(blocks * n2 * ne(p, 0, 3), ith, nth)
        for i in range(first, last):
            q = i // blocks
            start = (i - q * blocks) * 16
            i3 = q // n2
            i2 = q - i3 * n2
            x = address(p, 1) + start * nb(p, 1, 1) + i2 * nb(p, 1, 2) + i3 * nb(p, 1, 3)
            y = address(p, 0) + start * nb(p, 0, 1) + i2 * nb(p, 0, 2) + i3 * nb(p, 0, 3)
            for i0 in range(ne(p, 0, 0)):
                for j in range(min(n1 - start, 16)):
                    put(y + i0 * nb(p, 0, 0) + j * nb(p, 0, 1), get(x + i0 * nb(p, 1, 0) + j * nb(p, 1, 1)))
    return k


def move(emit: Emit, x: Tensor, dst: Sequence[Field], type: DType, rows: bool = True) -> bool:
    """Steps that write x into the nine words `dst`, which have its shape; `rows`: dst's elements lie side by side."""
    if _moves(x.type, type) and in_rows(x) and rows:
        emit(_copy(x.type.name, type.name), *dst, x)
        return True
    element = _element_kinds(x.type, type)
    if element is not None:
        emit(_scatter_elements(*element), *dst, x)
        return True
    if type is not F32 and _moves(F32, type) and rows and not f32_rows(x):
        between = as_rows(emit, x, "between")
        if between is not None:
            emit(_copy("F32", type.name), *dst, *between)
            return True
    return False


def _element_kinds(src: DType, dst: DType) -> tuple[str, str] | None:
    if src is dst and src.block == 1 and src.nbytes in _RAW:
        return _RAW[src.nbytes], _RAW[src.nbytes]
    if src in _ELEMENTS and dst in _ELEMENTS:
        return _ELEMENTS[src], _ELEMENTS[dst]
    return None


def as_rows(emit: Emit, x: Tensor, purpose: str) -> tuple[Field, ...] | None:
    """Nine words of x as F32 rows: x itself, or a copy in scratch memory for `purpose`; None if it cannot be read."""
    if f32_rows(x):
        return (x,)
    place, _ = emit.scratch(("F32 rows", purpose), int(x.numel) * 4)
    copy = (place, *x.ne, *strides(F32, x.ne))
    return copy if move(emit, x, copy, F32) else None


def over_rows(emit: Emit, kernel: Kernel, dst: Tensor, sources: Sequence[Tensor], *rest: Field, cuts: Cuts | None = None
              ) -> bool:
    """A step of dst, all sources as F32 rows, and the rest; False where a source cannot be read as such."""
    fields: list[Field] = []
    for i, x in enumerate(sources):
        rows = as_rows(emit, x, f"source {i}")
        if rows is None:
            return False
        fields += rows
    emit(kernel, dst, *fields, *rest, cuts=cuts)
    return True


# Copies.

def _reshaped(x: Tensor, dst: Tensor) -> tuple[Tensor, Tensor] | None:
    """Both in one shape, where that needs no copy."""
    if x.ne == dst.ne:
        return x, dst
    if packed(dst) and dst.type.block == 1:
        return x, shaped(dst, x.ne)
    if packed(x) and x.type.block == 1:
        return shaped(x, dst.ne), dst
    return None


def _copy_lowering(emit: Emit, node: Tensor) -> bool:
    pair = _reshaped(node.src[0], node)
    return pair is not None and move(emit, pair[0], (pair[1],), node.type, in_rows(pair[1]))


for _name in ("cont", "cast", "cpy"):
    lowers(_name)(_copy_lowering)


# Rows by number.

@template
def _get_rows(src, dst):
    """dst, src, row numbers"""
    f = _mover(dtypes.TYPES[src], dtypes.TYPES[dst])

    def k(p, ith, nth):
        n = ne(p, 0, 0)
        first, last = share(n_rows(p, 0), ith, nth)
        for r in range(first, last):
            i1, i2, i3 = unravel(p, 0, r)
            i = simd.get_i32(address(p, 2) + i1 * nb(p, 2, 0) + i2 * nb(p, 2, 1) + i3 * nb(p, 2, 2))
            if i < 0 or i >= ne(p, 1, 1):
                simd.fail(BAD_ROW)
                return
            f(address(p, 1) + i * nb(p, 1, 1) + i2 * nb(p, 1, 2) + i3 * nb(p, 1, 3), row(p, 0, i1, i2, i3), n)
    return k


@lowers("get_rows")
def get_rows(emit: Emit, node: Tensor) -> bool:
    x, rows = node.src
    if not _moves(x.type, node.type) or not in_rows(x):
        return False
    emit(_get_rows(x.type.name, node.type.name), node, x, rows)
    return True


@template
def _set_rows(src, dst):
    """dst, x, row numbers, which repeat along the batch axes"""
    f = _mover(dtypes.TYPES[src], dtypes.TYPES[dst])

    def k(p, ith, nth):
        n = ne(p, 1, 0)
        first, last = share(n_rows(p, 1), ith, nth)
        for r in range(first, last):
            i1, i2, i3 = unravel(p, 1, r)
            j2, j3 = i2 % ne(p, 2, 1), i3 % ne(p, 2, 2)
            i = simd.get_i32(address(p, 2) + i1 * nb(p, 2, 0) + j2 * nb(p, 2, 1) + j3 * nb(p, 2, 2))
            if i < 0 or i >= ne(p, 0, 1):
                simd.fail(BAD_ROW)
                return
            f(row(p, 1, i1, i2, i3), address(p, 0) + i * nb(p, 0, 1) + i2 * nb(p, 0, 2) + i3 * nb(p, 0, 3), n)
    return k


@lowers("set_rows")
def set_rows(emit: Emit, node: Tensor) -> bool:
    _, x, rows = node.src
    if rows.type is not I32 or not _moves(F32, node.type) or not in_rows(node):
        return False
    return over_rows(emit, _set_rows("F32", node.type.name), node, (x,), rows, cuts=by_tokens(x.ne[1] * x.ne[2] * x.ne[3]))


# Other shapes.

def _window(x: Tensor, ne: Sequence[int], start: Sequence[int] = (0, 0, 0, 0)) -> Tensor:
    """The part of x of shape ne from `start` on."""
    offset = sum(i * b for i, b in zip(start, x.nb))
    return Tensor("view", x.type, ne, (x,), nb=x.nb, view_src=x.root, view_offs=x.view_offs + offset)


@lowers("concat")
def concat(emit: Emit, node: Tensor) -> bool:
    a, b = node.src
    if node.type.block > 1:
        return False
    start = [a.ne[i] if i == node.params["axis"] else 0 for i in range(4)]
    return (move(emit, a, (_window(node, a.ne),), node.type)
            and move(emit, b, (_window(node, b.ne, start),), node.type))


@template
def _repeat(spread):
    """dst, x of 4-byte elements; `spread`: rows of x are single elements"""
    def k(p, ith, nth):
        n, m = ne(p, 0, 0), ne(p, 1, 0)
        first, last = share(n_rows(p, 0), ith, nth)
        for r in range(first, last):
            i1, i2, i3 = unravel(p, 0, r)
            x, y = row(p, 1, i1, i2, i3), row(p, 0, i1, i2, i3)
            if spread:
                _spread(y, simd.iota() * 0 + simd.get_i32(x), n)
            else:
                for start in range(0, n, m):
                    _move_bytes(x, y + 4 * start, 4 * m)
    return k


@inline
def _spread(y, x, n):
    for _ in range(n >> 4):
        simd.store_i32(y, x)
        y += 64
    if n & 15:
        simd.store_i32_n(y, x, n & 15)


@lowers("repeat")
def repeat(emit: Emit, node: Tensor) -> bool:
    x, = node.src
    if x.type.nbytes != 4 or x.type.block > 1:
        return False
    source: Sequence[Field] | None = (x,) if in_rows(x) else as_rows(emit, x, "repeat") if x.type is F32 else None
    if source is None:
        return False
    emit(_repeat(int(x.ne[0] == 1)), node, *source)
    return True


@template
def _zero():
    """dst, contiguous, of 4-byte elements"""
    def k(p, ith, nth):
        first, last = share(ne(p, 0, 0) * n_rows(p, 0), ith, nth)
        _spread(address(p, 0) + 4 * first, simd.iota() * 0, last - first)
    return k


@lowers("pad")
def pad(emit: Emit, node: Tensor) -> bool:
    x, = node.src
    emit(_zero(), node)
    return move(emit, x, (_window(node, x.ne, node.params["left"]),), F32)


@lowers("diag")
def diag(emit: Emit, node: Tensor) -> bool:
    x, = node.src
    emit(_zero(), node)
    diagonal = Tensor("view", F32, x.ne, (node,), nb=(node.nb[0] + node.nb[1], *node.nb[1:]), view_src=node)
    return move(emit, x, (diagonal,), F32, rows=False)


@template
def _roll():
    """dst, x rows, four shifts"""
    def k(p, ith, nth):
        n, n1, n2, n3 = ne(p, 0, 0), ne(p, 0, 1), ne(p, 0, 2), ne(p, 0, 3)
        first, last = share(n_rows(p, 0), ith, nth)
        for r in range(first, last):
            i1, i2, i3 = unravel(p, 0, r)
            x = row(p, 1, (i1 - simd.word(p, 19)) % n1, (i2 - simd.word(p, 20)) % n2, (i3 - simd.word(p, 21)) % n3)
            y, s = row(p, 0, i1, i2, i3), simd.word(p, 18) % n
            _move_bytes(x, y + 4 * s, 4 * (n - s))
            _move_bytes(x + 4 * (n - s), y, 4 * s)
    return k


@lowers("roll")
def roll(emit: Emit, node: Tensor) -> bool:
    return over_rows(emit, _roll(), node, node.src, *node.params["shifts"])


@template
def _tri():
    """dst, x rows, whether the lower part stays, with the diagonal or not"""
    def k(p, ith, nth):
        n, lower, diag = ne(p, 0, 0), simd.word(p, 18), simd.word(p, 19)
        first, last = share(n_rows(p, 0), ith, nth)
        for r in range(first, last):
            i1, i2, i3 = unravel(p, 0, r)
            x, y = row(p, 1, i1, i2, i3), row(p, 0, i1, i2, i3)
            a, b = (0, i1 + diag) if lower else (i1 + 1 - diag, n)             # what stays
            _spread(y, simd.iota() * 0, n)
            _move_bytes(x + 4 * a, y + 4 * a, 4 * (b - a))
    return k


@lowers("tri")
def tri(emit: Emit, node: Tensor) -> bool:
    return over_rows(emit, _tri(), node, node.src, int(node.params["lower"]), int(node.params["diag"]))


@template
def _arange():
    """dst, start, step"""
    def k(p, ith, nth):
        first, last = share(ne(p, 0, 0), ith, nth)
        for i in range(first, last):
            x = simd.to_f32(simd.iota() * 0 + i) * simd.f32(p, 10) + simd.f32(p, 9)
            simd.store_f32_n(address(p, 0) + 4 * i, x, 1)
    return k


@lowers("arange")
def arange(emit: Emit, node: Tensor) -> bool:
    emit(_arange(), node, float(node.params["start"]), float(node.params["step"]))
    return True
