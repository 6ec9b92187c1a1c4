"""Lowerings of attention."""
from __future__ import annotations

from ggraph.dtypes import DType
from ggraph.tensor import Tensor

from .activation import wanted, wish
from .device import Kernel
from .layout import PACKED, PLAIN, f32, plain
from .lower import Blocks, Emit, lowers

HEADS = 8                   # query heads of one block, at most
RUN = 128                   # cells of a block where few tokens leave the device idle
FEW = 8                     # tokens up to which cells are split over blocks
WIDTHS = (1, 2, 4, 8)       # times 128: elements of V


@lowers("flash_attn_ext")
def flash_attn_ext(emit: Emit, node: Tensor) -> bool:
    q, k, v, mask, sinks = node.src[:5]
    if not (f32(q, sinks) and cached(k) and cached(v) and (mask is None or plain(mask)) and v.ne[0] <= 128 * WIDTHS[-1]):
        return False
    n_tokens, n_kv, dk, dv = q.ne[1], k.ne[1], int(q.ne[0]), int(v.ne[0])
    groups = -(-(int(q.ne[2]) // int(k.ne[2])) // HEADS)
    width = next(w for w in WIDTHS if dv <= 128 * w)
    kernel = Kernel("attention", f"attend_{width}", (("K_TYPE", c_type(k.type)), ("V_TYPE", c_type(v.type))))
    p = node.params
    numbers = float(p["scale"]), float(p["max_bias"]), float(p["logit_softcap"])
    shared, z = 4 * HEADS * (dk + RUN), q.ne[3] * k.ne[2] * groups
    mask_type = mask.type.id if mask is not None else 0
    n_runs = -(-int(n_kv) // RUN)
    part, _ = emit.scratch("attention", 4 * n_runs * min(FEW, int(n_tokens)) * int(node.ne[1] * node.ne[3]) * (dv + 2))
    tickets, _ = emit.scratch("tickets", 4 * min(FEW, int(n_tokens)) * int(z))              # zero before and after each launch
    how = wish(emit.flow, node, (node,))
    to = int(how.floats), *wanted(emit, node, how)
    args = node, q, k, v, mask, sinks, mask_type
    with emit.when(n_tokens, 1, FEW):
        emit(kernel, *args, (*numbers, RUN), part, tickets, to, grid=(Blocks(n_kv, RUN), n_tokens, z), block=128, shared=shared)
    with emit.when(n_tokens, FEW + 1):
        emit(kernel, *args, (*numbers, 1 << 30), part, tickets, to, grid=(1, n_tokens, z), block=128, shared=shared)
    return True


def cached(x: Tensor) -> bool:
    return x.nb[0] == x.type.nbytes and (x.type in PLAIN or (x.type in PACKED and x.ne[0] % 32 == 0))


def c_type(type: DType) -> str:
    return type.name if type.quantized else f"Plain<{type.id}>"
