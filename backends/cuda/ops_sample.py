"""The lowering of sampling: a token of each row of logits, chosen on the device."""
from __future__ import annotations

from ggraph.tensor import Tensor

from .device import Kernel
from .lower import Blocks, Emit, lowers

MOST = 512                  # threads of a block, about four elements of a row each


@lowers("sample")
def sample(emit: Emit, node: Tensor) -> bool:
    logits, steps, uniform = node.src
    emit(Kernel("sample", "sample"), node, logits, steps, uniform, grid=(Blocks(logits.ne[1]),),
         block=min(MOST, max(32, -(-int(logits.ne[0]) // 128) * 32)))
    return True
