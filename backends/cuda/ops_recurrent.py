"""Lowerings of recurrences."""
from __future__ import annotations

from ggraph.tensor import Tensor

from .device import Kernel
from .layout import elements, f32
from .lower import Blocks, Emit, lowers

MAX_STATE = 256             # values of a warp's row of the state
MAX_HEAD = 1024             # threads of a block


@lowers("ssm_conv")
def ssm_conv(emit: Emit, node: Tensor) -> bool:
    emit(Kernel("conv", "ssm_conv"), node, *node.src, grid=elements(node))
    return f32(*node.src)


@lowers("ssm_scan")
def ssm_scan(emit: Emit, node: Tensor) -> bool:
    s, x = node.src[:2]
    emit(Kernel("recurrent", "ssm_scan"), node, *node.src, node.params["n_snapshots"],
         grid=(Blocks(x.ne[0] * x.ne[1], 4), x.ne[3]), block=128)
    return f32(*node.src[:6]) and s.ne[0] <= MAX_STATE


@lowers("gated_delta_net")
def gated_delta_net(emit: Emit, node: Tensor) -> bool:
    v = node.src[2]
    emit(Kernel("delta", "gated_delta_net"), node, *node.src, node.params["n_snapshots"],
         grid=(Blocks(v.ne[0], 4), v.ne[1], v.ne[3]), block=128)
    return f32(*node.src) and v.ne[0] <= MAX_STATE


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
