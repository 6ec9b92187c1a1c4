"""Lowerings of attention: cells split over blocks for few tokens, tiles of queries and cells for many."""
from __future__ import annotations

from ggraph.dtypes import DType
from ggraph.tensor import Tensor

from .activation import wanted, wish
from .device import Kernel
from .layout import PACKED, PLAIN, f32, plain
from .lower import Arg, Blocks, Emit, lowers

HEADS = 8                   # query heads of one block, at most
FEW = 32                    # tokens up to which cells are split over blocks
RUNS = ((128, 4096), (512, 1 << 15), (2048, 1 << 62))      # cells of a block, up to so many cells in all
WIDTHS = (1, 2, 4, 8)       # times 128: elements of V
TILE_WIDTHS = (1, 2, 4)     # times 64
ROWS = 64                   # query rows of a tile


@lowers("flash_attn_ext")
def flash_attn_ext(emit: Emit, node: Tensor) -> bool:
    q, k, v, mask, sinks = node.src[:5]
    if not (f32(q, sinks) and cached(k) and cached(v) and (mask is None or plain(mask)) and v.ne[0] <= 128 * WIDTHS[-1]):
        return False
    how = wish(emit.flow, node, (node,))
    to = int(how.floats), *wanted(emit, node, how)
    args = node, q, k, v, mask, sinks, mask.type.id if mask is not None else 0
    with emit.when(q.ne[1], 1, FEW):
        _runs(emit, node, args, to)
    with emit.when(q.ne[1], FEW + 1):
        _tiles(emit, node, args, to)
    return True


def _kernel(file: str, name: str, node: Tensor, width: int) -> Kernel:
    return Kernel(file, name, (("K_TYPE", c_type(node.src[1].type)), ("V_TYPE", c_type(node.src[2].type)), ("WIDTH", str(width))))


def _numbers(node: Tensor) -> tuple[float, ...]:
    p = node.params
    return float(p["scale"]), float(p["max_bias"]), float(p["logit_softcap"])


def _runs(emit: Emit, node: Tensor, args: tuple[Arg, ...], to: tuple[Arg, ...]) -> None:
    """Few tokens: cells are split over blocks."""
    n_kv, z, dv = node.src[1].ne[1], _groups(node), int(node.ne[0])
    most_runs, most = max(-(-min(int(n_kv), cells) // run) for run, cells in RUNS), min(FEW, int(node.src[0].ne[1]))
    part, _ = emit.scratch("attention", 4 * most_runs * most * int(node.ne[1] * node.ne[3]) * (dv + 2))
    tickets = emit.tickets(most * int(z))
    for (run, cells), least in zip(RUNS, (1, *(cells + 1 for _, cells in RUNS))):
        with emit.when(n_kv, least, cells):
            _attend(emit, node, (*args, (*_numbers(node), run), part, tickets, to), Blocks(n_kv, run))


def _groups(node: Tensor) -> int:
    """Query heads that share a KV head, up to HEADS of them, in all streams."""
    q, k = node.src[:2]
    n: int = q.ne[3] * k.ne[2] * -(-(int(q.ne[2]) // int(k.ne[2])) // HEADS)
    return n


def _attend(emit: Emit, node: Tensor, args: tuple[Arg, ...], runs: int | Blocks) -> None:
    q, dv = node.src[0], int(node.ne[0])
    width = next(w for w in WIDTHS if dv <= 128 * w)
    emit(_kernel("attention", "attend", node, width), *args, grid=(runs, q.ne[1], _groups(node)), block=128,
         shared=4 * HEADS * (int(q.ne[0]) + 128))


def _tiles(emit: Emit, node: Tensor, args: tuple[Arg, ...], to: tuple[Arg, ...]) -> None:
    """Many tokens: a block has ROWS query rows, which are tokens with the heads that share a KV head. Where these do not fit in
    shared memory (heads of 512 and more), a block has a token."""
    q, k, v = node.src[:3]
    dk, dv, shared_heads = int(q.ne[0]), int(v.ne[0]), int(q.ne[2]) // int(k.ne[2])
    shared = 4 * (ROWS * (dk + 1) + 64 * 33 + 2 * 64 * 65)
    if shared > emit.max_shared:
        _attend(emit, node, (*args, (*_numbers(node), 1 << 30), 0, 0, to), 1)
        return
    heads = min(shared_heads, ROWS)
    width = next((w for w in TILE_WIDTHS if dv <= 64 * w), TILE_WIDTHS[-1])
    y = k.ne[2] * -(-shared_heads // heads) * -(-dv // (64 * width))
    emit(_kernel("attention_tile", "tile", node, width), *args, (*_numbers(node), 0), ROWS // heads, to,
         grid=(Blocks(q.ne[1], ROWS // heads), y, q.ne[3]), shared=shared)


def cached(x: Tensor) -> bool:
    return x.nb[0] == x.type.nbytes and (x.type in PLAIN or (x.type in PACKED and x.ne[0] % 32 == 0))


def c_type(type: DType) -> str:
    return type.name if type.quantized else f"Plain<{type.id}>"
