"""Lowerings of recurrences."""
from __future__ import annotations

from ggraph.tensor import Tensor

from .device import Kernel
from .layout import elements, f32
from .lower import Blocks, Emit, lowers

MAX_STATE = 256             # values of a warp's row of the state
CHUNK = 64                  # tokens of a chunk of the delta rule
COLUMNS = 16                # of a state that a block has there
MAX_CHUNKED = 128           # values of a state's row there
MAX_HEAD = 256              # threads of a block


def lanes(n: int) -> tuple[tuple[str, str], ...]:
    """How many of n values of a state each lane of a warp has, as a macro."""
    return (("LANES", str(next(k for k in (1, 2, 4, 8) if n <= 32 * k or k == 8))),)


@lowers("ssm_conv")
def ssm_conv(emit: Emit, node: Tensor) -> bool:
    emit(Kernel("conv", "ssm_conv"), node, *node.src, grid=elements(node))
    return f32(*node.src)


@lowers("ssm_scan")
def ssm_scan(emit: Emit, node: Tensor) -> bool:
    s = node.src[0]
    scan(emit, node, node.src[2])
    return f32(*node.src[:6]) and s.ne[0] <= MAX_STATE


def scan(emit: Emit, node: Tensor, dt: Tensor, bias: Tensor | None = None, new: tuple[Tensor | None, ...] = (None, None)) -> None:
    """`new`: the tensor of new states and their rows, if they do not stay behind the outputs."""
    s, x, _, *rest = node.src
    emit(Kernel("recurrent", "ssm_scan", lanes(s.ne[0])), node, s, x, dt, *rest, node.params["n_snapshots"], bias, *new,
         grid=(Blocks(x.ne[0] * x.ne[1], 4), x.ne[3]), block=128)


@lowers("gated_delta_net")
def gated_delta_net(emit: Emit, node: Tensor) -> bool:
    v, g = node.src[2:4]
    chunked = (g.ne[0] == 1 and v.ne[0] <= MAX_CHUNKED and node.params["n_snapshots"] == 1
               and prepare_bytes(int(v.ne[0])) <= emit.max_shared)
    with emit.when(v.ne[2], 1, CHUNK - 1 if chunked else 1 << 62):
        emit(Kernel("delta", "gated_delta_net", lanes(v.ne[0])), node, *node.src, node.params["n_snapshots"],
             grid=(Blocks(v.ne[0], 4), v.ne[1], v.ne[3]), block=128)
    if chunked:
        with emit.when(v.ne[2], CHUNK):
            _in_chunks(emit, node)
    return f32(*node.src) and v.ne[0] <= MAX_STATE


def prepare_bytes(d: int) -> int:
    """Shared memory of a block."""
    return 4 * CHUNK * (2 * (d + 1) + CHUNK + 1)


def _in_chunks(emit: Emit, node: Tensor) -> None:
    """What does not depend on the state for all chunks at once, then the chunks one after the other."""
    q, k, v, g, beta, state = node.src
    d, n = int(v.ne[0]), int(v.numel)
    parts = [emit.scratch(("delta", name), size)[0] for name, size in
             (("u", 4 * n), ("w", 4 * n), ("p", 4 * n // d * CHUNK), ("gates", 4 * n // d))]
    emit(Kernel("delta_chunk", "prepare"), q, k, v, g, beta, *parts, grid=(Blocks(v.ne[2], CHUNK), v.ne[1], v.ne[3]),
         shared=prepare_bytes(d))
    emit(Kernel("delta_chunk", "chunks"), node, q, k, v, state, *parts, grid=(Blocks(d, COLUMNS), v.ne[1], v.ne[3]),
         shared=4 * ((CHUNK + COLUMNS) * (d + 1) + CHUNK * (COLUMNS + 1)))


def _linear(emit: Emit, node: Tensor, *more: float) -> bool:
    d, n_head = node.src[0].ne[:2]
    emit(Kernel("recurrent", node.op), node, *node.src, *more, grid=(n_head, node.src[-1].ne[1]), block=int(d))
    return f32(*node.src) and d <= MAX_HEAD


@lowers("rwkv_wkv6")
def rwkv_wkv6(emit: Emit, node: Tensor) -> bool:
    return _linear(emit, node)


@lowers("rwkv_wkv7")
def rwkv_wkv7(emit: Emit, node: Tensor) -> bool:
    return _linear(emit, node)


@lowers("gated_linear_attn")
def gated_linear_attn(emit: Emit, node: Tensor) -> bool:
    return _linear(emit, node, float(node.params["scale"]))
