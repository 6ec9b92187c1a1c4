"""Lowerings of ops over rows: norms, sums, softmax, sorting, Hadamard."""
from __future__ import annotations

from ggraph.tensor import Tensor

from .device import Kernel
from .layout import elements, f32, plain, rows, threads
from .lower import Blocks, Emit, lowers

MAX_SORTED = 8192           # elements of a row, which are sorted in shared memory
MAX_HADAMARD = 8192


@lowers("group_norm")
def group_norm(emit: Emit, node: Tensor) -> bool:
    x, n_groups = node.src[0], node.params["n_groups"]
    step = -(-int(x.ne[2]) // n_groups)
    emit(Kernel("rows", "group_norm"), node, x, step, float(node.params["eps"]), grid=(Blocks(x.ne[2], step), x.ne[3]))
    return f32(node, x)


@lowers("sum_rows")
def sum_rows(emit: Emit, node: Tensor) -> bool:
    emit(Kernel("rows", "sum_rows"), node, node.src[0], 0, grid=rows(node))
    return f32(node.src[0])


@lowers("mean")
def mean(emit: Emit, node: Tensor) -> bool:
    emit(Kernel("rows", "sum_rows"), node, node.src[0], 1, grid=rows(node))
    return f32(node.src[0])


@lowers("cumsum")
def cumsum(emit: Emit, node: Tensor) -> bool:
    emit(Kernel("rows", "cumsum"), node, node.src[0], grid=rows(node))
    return f32(node.src[0])


@lowers("soft_max")
def soft_max(emit: Emit, node: Tensor) -> bool:
    x, mask, sinks = node.src
    p = node.params
    emit(Kernel("rows", "soft_max"), node, x, mask, sinks, mask.type.id if mask is not None else 0, float(p["scale"]),
         float(p["max_bias"]), grid=rows(node), block=threads(x.ne[0]))
    return f32(node, x, sinks) and (mask is None or plain(mask))


@lowers("pool_1d")
def pool_1d(emit: Emit, node: Tensor) -> bool:
    emit(Kernel("rows", "pool_1d"), node, node.src[0], node.params["k"], grid=elements(node))
    return f32(node.src[0])


def _sort(emit: Emit, node: Tensor, descending: bool) -> bool:
    x = node.src[0]
    padded = 1 << (int(x.ne[0]) - 1).bit_length()
    emit(Kernel("rows", "sort"), node, x, padded, -1.0 if descending else 1.0, grid=rows(node), shared=8 * padded)
    return f32(x) and padded <= MAX_SORTED and 8 * padded <= emit.max_shared


@lowers("argsort")
def argsort(emit: Emit, node: Tensor) -> bool:
    return _sort(emit, node, node.params["descending"])


@lowers("top_k")
def top_k(emit: Emit, node: Tensor) -> bool:
    return _sort(emit, node, True)


@lowers("hadamard")
def hadamard(emit: Emit, node: Tensor) -> bool:
    x, n = node.src[0], node.params["n"]
    grid = (x.ne[0] // n, *rows(x))
    emit(Kernel("rows", "hadamard"), node, x, n, float(n ** -0.5), grid=grid, block=min(256, max(32, n // 2)), shared=4 * n)
    return f32(x) and n <= MAX_HADAMARD
