"""Products of matrices: quantized weights times 8-bit activations, and plain types times floats.

Fusions: products of the same activations (Q, K and V) are one launch for few columns, with the bias and the residual that are added
to each; those for gate and up are one with their activation.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ggraph import dtypes
from ggraph.tensor import Tensor

from ..lowering import apart, disjoint, packed
from . import crossover
from .activation import NOWHERE, PARTS, Bytes, Wish, content, multiplies, quantized, wanted, wish
from .crossover import FEW, NARROW, WIDE
from .device import LIBRARY, Kernel
from .flow import Flow
from .layout import elements, f32, plain
from .lower import Blocks, Emit, Fusion, fuses, lowers
from .ops_glu import NUMBERS, parameters
from .ops_move import typed

WARPS = 4                   # rows of a block of the mat-vec kernels
TILE = 64                   # rows and columns of a block of the mat-mul kernels
COLUMNS = (1, 2, 4, FEW)    # for which there are mat-vec kernels


class Product(NamedTuple):
    """Weights times activations, and what is added to that."""
    a: Tensor
    nodes: tuple[Tensor, ...]
    bias: Tensor | None = None
    residual: Tensor | None = None

    @property
    def last(self) -> Tensor:
        return self.nodes[-1]

    @property
    def sum(self) -> tuple[Tensor | None, ...]:
        """The struct Sum of kernels/parts.cuh."""
        return self.last, self.bias, self.residual


@lowers("mul_mat")
def mul_mat(emit: Emit, node: Tensor) -> bool:
    a, b = node.src
    if not (multiplies(node) or plain(a, b)):
        return False
    _products(emit, [Product(a, (node,))])
    return True


@fuses("mul_mat")
def grouped(flow: Flow, node: Tensor) -> Fusion | None:
    """Products of the same activations, each with what is added to it."""
    if not _of_weights(node):
        return None
    group = [_product(flow, node)]
    for other in flow.ahead():
        nodes = tuple(n for p in group for n in p.nodes)
        if len(group) < PARTS and other not in nodes and _beside(node, other) and flow.can_run(*nodes, other):
            group.append(_product(flow, other, nodes))
    nodes = tuple(n for p in group for n in p.nodes)
    return Fusion(nodes, lambda emit: _products(emit, group)) if len(nodes) > 1 else None


def _of_weights(node: Tensor) -> bool:
    return multiplies(node) or (plain(*node.src) and node.src[0].op == "none")


def _beside(node: Tensor, other: Tensor) -> bool:
    """Of the same activations, and to be multiplied by the same kernel."""
    if other.op != "mul_mat" or other.src[1] is not node.src[1] or not _of_weights(other):
        return False
    return multiplies(other) if multiplies(node) else other.src[0].type is node.src[0].type


def _product(flow: Flow, node: Tensor, taken: tuple[Tensor, ...] = (), most: int = 2) -> Product:
    """With up to `most` sums behind it, if those may run with what is taken already."""
    nodes: list[Tensor] = [node]
    terms: list[Tensor] = []
    while len(terms) < most:
        last = nodes[-1]
        add = flow.next(last, "add")
        if add is None or not any(s is last for s in add.src):
            break
        other = add.src[1] if add.src[0] is last else add.src[0]
        if not (f32(add, other) and add.ne == node.ne and other.root is not last and apart(add, other) and _clear(node, add)
                and flow.can_run(*taken, *nodes, add)):
            break
        nodes.append(add)
        terms.append(other)
    return Product(node.src[0], tuple(nodes), *terms)


def _clear(node: Tensor, dst: Tensor) -> bool:
    """Floats are read while the result is written: it must not stand where they do."""
    return multiplies(node) or disjoint(dst, node.src[1])


def _products(emit: Emit, group: Sequence[Product]) -> None:
    """Up to PARTS products: for few columns with one launch."""
    node = group[0].nodes[0]
    if not multiplies(node):
        _floats(emit, group)
        return
    at = quantized(emit, node.src[1])
    m, b2, b3 = node.ne[1:]
    parts, blocks = _parts(group)
    for columns, least in zip(COLUMNS, (1, *(c + 1 for c in COLUMNS))):
        with emit.when(m, least, columns):
            emit(Kernel("matvec", f"matvec_{columns}", _types(group)), parts, *at, grid=(blocks, b2, b3), block=128)
    with emit.when(m, FEW + 1):
        for p in group:
            _matmul(emit, p, at)


def _parts(group: Sequence[Product]) -> tuple[tuple[Tensor | None, ...], int | Blocks]:
    """The struct Parts of kernels/parts.cuh, and how many blocks have rows of them."""
    parts = tuple(t for p in group for t in (p.a, *p.sum)) + (None,) * 4 * (PARTS - len(group))
    if len(group) == 1:
        return parts, Blocks(group[0].a.ne[1], WARPS)
    return parts, sum(-(-int(p.a.ne[1]) // WARPS) for p in group)


def _matmul(emit: Emit, p: Product, at: Bytes) -> None:
    """For many columns: tiles, or the library where that pays."""
    (k, n), (m, b2, b3) = p.a.ne[:2], p.last.ne[1:]
    library = (emit.library and int(m) >= crossover.LIBRARY and b2 * b3 == 1 and p.a.ne[2] * p.a.ne[3] == 1 and packed(p.a)
               and 2 * int(k) * int(n) <= crossover.LARGEST)
    for columns, most in ((NARROW, NARROW), (WIDE, crossover.LIBRARY - 1 if library else 1 << 62)):
        with emit.when(m, FEW + 1 if columns == NARROW else NARROW + 1, most):
            emit(typed("matmul", f"matmul_{columns}", p.a.type), p.a, p.sum, *at,
                 grid=(Blocks(n, TILE), Blocks(m, columns), b2 * b3))
    if library:
        with emit.when(m, crossover.LIBRARY):
            _by_library(emit, p, at)


def _by_library(emit: Emit, p: Product, at: Bytes) -> None:
    """Weights and activations as bfloat16, the product, and what is added to it."""
    (k, n), m, x = p.a.ne[:2], p.last.ne[1], p.nodes[0].src[1]
    weights, _ = emit.scratch("weights", 2 * n * k)
    columns, held = emit.scratch("columns", 2 * m * k, content(x))
    emit(typed("unpack", "unpack_bf16", p.a.type), p.a, weights, grid=(Blocks(n * k, 32 * 64),), block=64)
    if not held:
        emit(Kernel("activation", "unpack_bf16"), *at, columns, m * k, grid=(Blocks(m * k, 256),))
    emit(LIBRARY, weights, columns, (p.nodes[0],), n, m, k, dtypes.BF16.id, grid=(1,))
    emit.alone(*p.nodes[1:])


def _types(group: Sequence[Product]) -> tuple[tuple[str, str], ...]:
    """Macros: that of the first, and those that differ from it."""
    first = group[0].a.type
    return tuple((f"TYPE_{i}", p.a.type.name) for i, p in enumerate(group) if i == 0 or p.a.type is not first)


# --- gate and up

@fuses("mul_mat")
def gated(flow: Flow, node: Tensor) -> Fusion | None:
    """The products for gate and up, and what the activation makes of both."""
    if not _of_weights(node) or node.src[0].ne[2] * node.src[0].ne[3] != 1:
        return None
    first = _product(flow, node, most=1)
    glu = flow.next(first.last, *NUMBERS)
    if glu is None or not f32(glu) or not glu.contiguous or not _clear(node, glu):
        return None
    wide = _halves(glu, first) or _pair(flow, glu, first)
    if wide is None:
        return None
    gate, up = wide
    nodes = (*dict.fromkeys((*gate.nodes, *up.nodes)), glu)
    how = wish(flow, glu, nodes) if multiplies(node) else Wish(True, False)
    return Fusion(nodes, lambda emit: _gated(emit, glu, gate, up, how)) if flow.can_run(*nodes) else None


def _pair(flow: Flow, glu: Tensor, first: Product) -> tuple[Product, Product] | None:
    """Two matrices."""
    node = first.nodes[0]
    other = glu.src[1] if glu.src[0] is first.last else glu.src[0]
    start = other.src[0] if other.op == "add" else other
    if start not in flow.order or start in flow.done or not _beside(node, start) or start.ne != node.ne or start is node:
        return None
    second = _product(flow, start, first.nodes, most=1)
    if second.last is not other or flow.next(other, glu.op) is not glu or first.last not in glu.src:
        return None
    return (first, second) if glu.src[0] is first.last else (second, first)


def _halves(glu: Tensor, both: Product) -> tuple[Product, Product] | None:
    """One matrix with both, rows of the first half for the gate."""
    n, a = glu.ne[0], both.a
    gate, up = glu.src
    if both.bias is not None or not (gate.root is up.root is both.last and both.last.ne[0] == 2 * n and gate.view_offs == 0
                                     and up.view_offs == 4 * n and gate.ne == up.ne == glu.ne):
        return None
    rows = [Tensor("view", a.type, (a.ne[0], n), (a,), nb=a.nb[:2], view_src=a.root, view_offs=a.view_offs + i * n * a.nb[1])
            for i in (0, 1)]
    return Product(rows[0], both.nodes), Product(rows[1], both.nodes)


def _gated(emit: Emit, glu: Tensor, gate: Product, up: Product, how: Wish) -> None:
    node = gate.nodes[0]
    x, packed_x = node.src[1], multiplies(node)
    at = quantized(emit, x) if packed_x else NOWHERE
    to = int(how.floats), *wanted(emit, glu, how, besides=x)
    n, m, b2, b3 = glu.ne
    args = glu, gate.a, up.a, gate.bias, up.bias, parameters(glu)
    for columns, least in zip(COLUMNS, (1, *(c + 1 for c in COLUMNS))):
        with emit.when(m, least, columns):
            if packed_x:
                emit(Kernel("gated", f"gated_{columns}", _types((gate, up))), *args, *at, *to, grid=(Blocks(n, 32), b2, b3),
                     block=512)
            else:
                emit(typed("matfloat", f"gated_{columns}", gate.a.type), *args, x, x.type.id, grid=(Blocks(n, WARPS), b2, b3),
                     block=128)
    with emit.when(m, FEW + 1):
        for p in (gate, up) if gate.nodes != up.nodes else (Product(node.src[0], gate.nodes),):
            if packed_x:
                _matmul(emit, p, at)
            else:
                _float_matmul(emit, p)
        emit(Kernel("elementwise", "glu"), glu, *glu.src, parameters(glu), *to, grid=elements(glu))


# --- plain types

def _floats(emit: Emit, group: Sequence[Product]) -> None:
    node = group[0].nodes[0]
    x, (m, b2, b3) = node.src[1], node.ne[1:]
    parts, blocks = _parts(group)
    for columns, least in zip(COLUMNS, (1, *(c + 1 for c in COLUMNS))):
        with emit.when(m, least, columns):
            emit(typed("matfloat", f"matvec_{columns}", group[0].a.type), parts, x, x.type.id, grid=(blocks, b2, b3), block=128)
    with emit.when(m, FEW + 1):
        for p in group:
            _float_matmul(emit, p)


def _float_matmul(emit: Emit, p: Product) -> None:
    """For many columns: tiles in float32, or the library for weights of 16 bits."""
    (k, n), (m, b2, b3), x = p.a.ne[:2], p.last.ne[1:], p.nodes[0].src[1]
    library = (emit.library and p.a.type is not dtypes.F32 and b2 * b3 == 1 and p.a.op == "none" and packed(p.a)
               and int(m) >= crossover.PLAIN_LIBRARY)
    with emit.when(m, 1, crossover.PLAIN_LIBRARY - 1 if library else 1 << 62):
        emit(typed("matfloat", "matmul", p.a.type), p.a, p.sum, x, x.type.id, grid=(Blocks(n, TILE), Blocks(m, TILE), b2 * b3))
    if library:
        with emit.when(m, crossover.PLAIN_LIBRARY):
            columns, held = emit.scratch("columns", 2 * m * k, (content(x), p.a.type))
            if not held:
                seen = (columns, k, m, 1, 1, 2, 2 * k, 2 * k * m, 2 * k * m)                    # a Tensor in that memory
                emit(Kernel("move", "copy"), seen, x, p.a.type.id, x.type.id, grid=(Blocks(m * k, 256),))
            emit(LIBRARY, (p.a,), columns, (p.nodes[0],), n, m, k, p.a.type.id, grid=(1,))
            emit.alone(*p.nodes[1:])


@lowers("out_prod")
def out_prod(emit: Emit, node: Tensor) -> bool:
    a, b = node.src
    emit(typed("matfloat", "out_prod", a.type), node, a, b, b.type.id, grid=(Blocks(node.numel, 256),))
    return plain(a, b)


@lowers("solve_tri")
def solve_tri(emit: Emit, node: Tensor) -> bool:
    a, b = node.src
    emit(typed("matfloat", "solve_tri", dtypes.F32), node, a, b, grid=(Blocks(node.ne[0], 64), node.ne[2], node.ne[3]), block=64)
    return f32(a, b)
