"""Products with an expert for each column, and the fusions of a mixture of experts.

For few tokens each column reads its expert's matrix; for many, columns are grouped by expert.

    soft_max [add] top_k                                        -> the router
    mul_mat_id [add_id] of gate and up, glu                     -> one launch, its result as 8-bit activations
    mul_mat_id [add_id] mul add .. [add], with what makes       -> the weighted sum of the experts with the residual
    the weights: get_rows [soft_max] [sum_rows clamp div] [scale]
"""
from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from ggraph.dtypes import F32
from ggraph.tensor import Tensor

from ..lowering import apart, disjoint
from .activation import multiplies, quantized, wanted, wish
from .crossover import FEW, NARROW, WIDE
from .device import Kernel
from .flow import Flow
from .layout import elements, f32, in_rows, plain, threads
from .lower import Blocks, Emit, Fusion, fuses, lowers
from .ops_glu import NUMBERS, parameters
from .ops_matmul import TILE, WARPS
from .ops_move import typed

GATING = {"soft_max": 0, "sigmoid": 1, "softplus": 2}
MAX_EXPERTS = 4096
MAX_USED = 32


class Expert(NamedTuple):
    """A product with an expert for each column, and its bias."""
    nodes: tuple[Tensor, ...]
    bias: Tensor | None

    @property
    def product(self) -> Tensor:
        return self.nodes[0]

    @property
    def last(self) -> Tensor:
        return self.nodes[-1]

    @property
    def a(self) -> Tensor:
        weight: Tensor = self.product.src[0]
        return weight


@lowers("mul_mat_id")
def mul_mat_id(emit: Emit, node: Tensor) -> bool:
    a, b, ids = node.src
    if multiplies(node):
        _products(emit, Expert((node,), None))
        return True
    grid = (Blocks(a.ne[1], WARPS), node.ne[1], node.ne[2])
    emit(typed("matfloat", "matvec_id", a.type), node, a, b, ids, b.type.id, grid=grid, block=128)
    return plain(a, b)


def _products(emit: Emit, e: Expert) -> None:
    quantized(emit, e.product.src[1])                               # whatever the number of tokens
    with emit.when(e.product.ne[2], 1, FEW):
        _one_by_one(emit, e)
    with emit.when(e.product.ne[2], FEW + 1):
        _grouped(emit, e)


def _grouped(emit: Emit, e: Expert) -> None:
    """Many tokens: slots grouped by expert, tiles of them. How wide these are is a matter of how many slots an expert has."""
    a, b, ids = e.product.src
    at, n_expert, n_used, n_tokens = quantized(emit, b), int(a.ne[2]), int(ids.ne[0]), ids.ne[1]
    enough = NARROW * n_expert // n_used
    for columns, least, most in ((NARROW, 1, enough), (WIDE, enough + 1, 1 << 62)):
        n_tiles = Blocks(n_used * n_tokens + n_expert * columns, columns)
        most_tiles = -(-int(n_tiles.n) // columns)
        with emit.when(n_tokens, least, most):
            tiles, held = emit.scratch(("tiles", columns), 12 * most_tiles, ids)
            order, _ = emit.scratch(("order", columns), 4 * n_used * int(n_tokens), ids)
            if not held:
                emit(Kernel("group", "group"), ids, n_expert, columns, most_tiles, tiles, order, grid=(1,), block=1024,
                     shared=8 * n_expert)
            emit(typed("matmul", f"matmul_id_{columns}", a.type), e.last, a, e.bias, tiles, order, *at, b.ne[1],
                 grid=(Blocks(a.ne[1], TILE), n_tiles))


def _one_by_one(emit: Emit, e: Expert) -> None:
    a, b, ids = e.product.src
    emit(_kernel("matvec_id", e), e.last, a, e.bias, ids, *quantized(emit, b), b.ne[1],
         grid=(Blocks(a.ne[1], WARPS), *e.product.ne[1:3]), block=128)


def _kernel(name: str, *experts: Expert) -> Kernel:
    types = [e.a.type.name for e in experts]
    return Kernel("experts", name, tuple((f"TYPE_{i}", t) for i, t in enumerate(types) if i == 0 or t != types[0]))


def _expert(flow: Flow, node: Tensor, taken: tuple[Tensor, ...] = ()) -> Expert:
    add = flow.next(node, "add_id")
    fits = add is not None and add.src[0] is node and add.src[2] is node.src[2] and f32(add.src[1]) and in_rows(add.src[1])
    if add is not None and fits and flow.can_run(*taken, node, add):
        return Expert((node, add), add.src[1])
    return Expert((node,), None)


@fuses("mul_mat_id")
def biased(flow: Flow, node: Tensor) -> Fusion | None:
    e = _expert(flow, node)
    return Fusion(e.nodes, lambda emit: _products(emit, e)) if e.bias is not None and multiplies(node) else None


# --- gate and up

@fuses("mul_mat_id")
def gated(flow: Flow, node: Tensor) -> Fusion | None:
    """The products for gate and up, and what the activation makes of both."""
    first = _expert(flow, node)
    glu = flow.next(first.last, *NUMBERS)
    if glu is None or not multiplies(node) or not f32(glu) or not glu.contiguous or first.last not in glu.src:
        return None
    other = glu.src[1] if glu.src[0] is first.last else glu.src[0]
    start = other.src[0] if other.op == "add_id" else other
    if start is node or start not in flow.order or start in flow.done or not _beside(node, start):
        return None
    second = _expert(flow, start, first.nodes)
    nodes = (*first.nodes, *second.nodes, glu)
    if second.last is not other or flow.next(other, glu.op) is not glu or not flow.can_run(*nodes):
        return None
    gate, up = (first, second) if glu.src[0] is first.last else (second, first)
    how = wish(flow, glu, nodes)
    b, ids = node.src[1:]

    def emit_gated(emit: Emit) -> None:
        at = quantized(emit, b)
        to = int(how.floats), *wanted(emit, glu, how, besides=b)
        n, n_used, n_tokens, _ = glu.ne
        with emit.when(n_tokens, 1, FEW):
            emit(_kernel("gated_id", gate, up), glu, gate.a, up.a, gate.bias, up.bias, parameters(glu), ids, *at, b.ne[1], *to,
                 grid=(Blocks(n, 32), n_used, n_tokens), block=512)
        with emit.when(n_tokens, FEW + 1):
            _grouped(emit, gate)
            _grouped(emit, up)
            emit(Kernel("elementwise", "glu"), glu, *glu.src, parameters(glu), *to, grid=elements(glu))
    return Fusion(nodes, emit_gated)


def _beside(node: Tensor, other: Tensor) -> bool:
    return (other.op == "mul_mat_id" and other.src[1].root is node.src[1].root and other.src[1].ne == node.src[1].ne
            and other.src[2] is node.src[2] and other.ne == node.ne and multiplies(other))


# --- the router

@fuses(*GATING)
def route(flow: Flow, node: Tensor) -> Fusion | None:
    """What the gating makes of the logits, and the experts chosen by that, plus a bias or not."""
    nodes: tuple[Tensor, ...] = (node,)
    x, bias = node.src[0], None
    if node.op == "softplus":
        root = flow.next(node, "sqrt")
        if root is None or root.src[0] is not node:
            return None
        nodes = node, root
    probs = nodes[-1]
    readers = flow.readers.reads.get(probs, [])
    add = next((r for r in readers if r.op == "add" and r.src[0] is probs and r.src[1].numel == probs.ne[0]), None)
    by = add if add is not None else probs
    top_k = next((r for r in flow.readers.reads.get(by, []) if r.op == "top_k" and r.src[0] is by), None)
    if top_k is None or (add is not None and flow.next(add, "top_k") is None):
        return None
    bias = add.src[1] if add is not None else None
    nodes = (*nodes, *((add,) if add is not None else ()), top_k)
    bare = node.op != "soft_max" or (node.src[1] is node.src[2] is None and node.params["scale"] == 1.0)
    fits = (bare and f32(x, probs, bias) and x.ne[2] * x.ne[3] == 1 and in_rows(x, probs) and int(x.ne[0]) <= MAX_EXPERTS
            and apart(probs, x) and disjoint(top_k, x) and flow.can_run(*nodes))
    return Fusion(nodes, lambda emit: emit(
        Kernel("route", "route"), probs, top_k, x, bias, GATING[node.op], grid=(x.ne[1],), block=threads(x.ne[0]),
        shared=4 * int(x.ne[0]))) if fits else None


# --- the weighted sum

class Weighing(NamedTuple):
    """Weights of the chosen experts from `probs` [1, n_expert, n_tokens]; `numbers` is the struct Weights of kernels/experts.cu."""
    nodes: tuple[Tensor, ...]
    probs: Tensor
    numbers: tuple[int | float, ...]


@fuses("mul_mat_id")
def weighted(flow: Flow, node: Tensor) -> Fusion | None:
    """The last product of the experts, and all up to the residual."""
    e, (b, ids) = _expert(flow, node), node.src[1:]
    mul = flow.next(e.last, "mul")
    if mul is None or mul.src[0] is not e.last or not multiplies(node) or int(ids.ne[0]) > MAX_USED or b.ne[1] != ids.ne[0]:
        return None
    weighing, adds = _weighing(flow, mul.src[1], mul, ids), _sum(flow, mul)
    if weighing is None or not adds:
        return None
    total, residual = adds[-1], None
    add = flow.next(total, "add")
    if add is not None and total in add.src and add.src[0] is not add.src[1] and f32(add) and add.ne == total.ne:
        other = add.src[1] if add.src[0] is total else add.src[0]
        if f32(other) and other.ne == total.ne and apart(add, other) and flow.can_run(
                *e.nodes, *weighing.nodes, mul, *adds, add):
            adds, total, residual = [*adds, add], add, other
    nodes = (*e.nodes, *weighing.nodes, mul, *adds)
    if not (total.contiguous and disjoint(total, weighing.probs) and disjoint(total, ids) and flow.can_run(*nodes)):
        return None

    def emit_weighted(emit: Emit) -> None:
        at = quantized(emit, b)
        with emit.when(total.ne[1], 1, FEW):
            emit(_kernel("weighted_id", e), total, e.a, e.bias, ids, weighing.probs, weighing.numbers, residual, *at,
                 grid=(Blocks(e.a.ne[1], WARPS), total.ne[1]), block=128)
        with emit.when(total.ne[1], FEW + 1):
            _grouped(emit, e)
            emit.alone(*weighing.nodes, mul, *adds)
    return Fusion(nodes, emit_weighted)


def _sum(flow: Flow, mul: Tensor) -> list[Tensor]:
    """The adds of the parts of `mul` [n, n_used, n_tokens], in the order of choice; none if it is anything else."""
    n, n_used, n_tokens, _ = mul.ne
    readers = flow.readers.of(mul) or []
    parts = [s for r in readers for s in r.src if s.root is mul]
    in_order = all(p.ne[:2] == (n, n_tokens) and p.nb[1] == mul.nb[2] and p.view_offs == i * mul.nb[1] for i, p in enumerate(parts))
    linked = all(r.op == "add" for r in readers) and all(b.src[0] is a and flow.next(a, "add") is b for a, b in pairwise(readers))
    whole = len(parts) == n_used == len(readers) + 1 and readers[0].src[0].root is mul
    return list(readers) if whole and in_order and linked else []


def _weighing(flow: Flow, weights: Tensor, mul: Tensor, ids: Tensor) -> Weighing | None:
    """Back from the weights [1, n_used, n_tokens]."""
    nodes: list[Tensor] = []
    x, reader = weights.root, mul
    softmax = divide = scaled = 0
    low, high, factor = 0.0, 0.0, 1.0
    if x.op == "scale" and flow.next(x, reader.op) is reader and x.params["bias"] == 0:
        nodes, reader, scaled, factor = [x], x, 1, float(x.params["s"])
        x = x.src[0].root
    if x.op == "div" and flow.next(x, reader.op) is reader:
        clamp = x.src[1].root
        total = clamp.src[0].root if clamp.op == "clamp" else clamp
        if total.op != "sum_rows" or total.src[0].root is not x.src[0].root or flow.next(total, "clamp", "div") is None:
            return None
        low, high = (float(clamp.params["lo"]), float(clamp.params["hi"])) if clamp is not total else (-float("inf"), float("inf"))
        nodes, reader, divide = [*dict.fromkeys((total, clamp)), x, *nodes], x, 1
        x = x.src[0].root
    if x.op == "soft_max" and flow.next(x, reader.op) is reader and x.src[1] is x.src[2] is None and x.params["scale"] == 1.0:
        nodes, reader, softmax = [x, *nodes], x, 1
        x = x.src[0].root
    inside = set(flow.readers.of(x) or [x]) <= {*nodes, mul}
    if x.op != "get_rows" or x.src[1] is not ids or x.src[0].type is not F32 or x.src[0].ne[0] != 1 or not inside:
        return None
    nodes = [x, *nodes]
    if any(n not in flow.order or n in flow.done for n in nodes):
        return None
    return Weighing(tuple(nodes), x.src[0], (softmax, divide, low, high, scaled, factor))
