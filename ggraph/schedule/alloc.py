"""Where every intermediate lives: offsets in one arena per device, by lifetime, with reuse in place.

In: splits in running order, inputs, outputs. Out: tensors with `buffer` and `offset`, and the arena's size. Sizes are the
largest that the Context allows, so that the offsets stay right for every smaller batch.
"""
from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..backend import Backend
from ..ops import GLU, UNARY
from ..tensor import F32, Tensor, leaf
from .split import Split

ALIGN = 64
FOREVER = leaf(F32, (1,), "reserved")        # who has the reserved bytes
IN_PLACE = frozenset({"add", "sub", "mul", "div", "scale", "clamp", "soft_max", "rope", *UNARY, *GLU})


@dataclass
class Life:
    """Steps between which a tensor's bytes are needed; `device` is the backend, one for all host backends."""
    tensor: Tensor
    device: Backend
    start: int
    end: int


class Arena:
    """The bytes of all plans of one Context on one device. Growing it moves it: plans made before are then invalid."""

    def __init__(self, backend: Backend):
        self.backend = backend
        self.nbytes = 0
        self.buffer: Any = None

    def reserve(self, nbytes: int) -> bool:
        """Make room; True if the arena moved."""
        if self.buffer is not None and nbytes <= self.nbytes:
            return False
        self.free()
        self.buffer = self.backend.alloc(nbytes)
        self.nbytes = nbytes
        return True

    def free(self) -> None:
        if self.buffer is not None:
            self.backend.free(self.buffer)
        self.nbytes, self.buffer = 0, None


def lifetimes(splits: Sequence[Split], inputs: Iterable[Tensor], keep: Collection[Tensor],
              device: dict[Backend, Backend]) -> list[Life]:
    """In order of first use. Inputs live from the start, since the host fills them before the run; `keep` to the end.

    What a concat reads lives as long as its result, so that a backend may leave the concat out and read its sources."""
    lives: dict[Tensor, Life] = {}
    host = list(device.values())[-1]                # the host is the last of the backends
    for tensor in inputs:
        lives[tensor] = Life(tensor, host, 0, 0)
    step = 0
    for part in splits:
        here = device[part.backend]
        for source, twin in part.copies:
            lives[source].end = step
            lives[twin] = Life(twin, here, step, step)
        for node in part.nodes:
            step += 1
            for t in (*node.src, node):
                if t is not None and (t.root in lives or t.root.op != "none"):
                    lives.setdefault(t.root, Life(t.root, here, step, step)).end = step
    for node in (n for part in reversed(splits) for n in reversed(part.nodes) if n.op == "concat"):
        for source in node.src:
            if source is not None and source.root in lives:
                lives[source.root].end = max(lives[source.root].end, lives[node].end)
    for tensor in keep:
        lives[tensor.root].end = step
    return list(lives.values())


def allocate(lives: Sequence[Life], no_reuse: Collection[Tensor] = (), reserved: Mapping[Backend, int] | None = None
             ) -> dict[Backend, int]:
    """Give every tensor an offset (`tensor.offset`); the bytes needed per device. The first `reserved` bytes stay free."""
    ends = {life.tensor: life.end for life in lives}
    open_blocks: dict[Backend, list[tuple[int, int, int, Tensor]]] = {}            # (offset, size, end, tensor)
    total: dict[Backend, int] = {}
    for device, n in (reserved or {}).items():
        total[device] = n = -(-n // ALIGN) * ALIGN
        open_blocks[device] = [(0, n, 1 << 62, FOREVER)]
    for life in lives:
        blocks = open_blocks.setdefault(life.device, [])
        blocks[:] = [b for b in blocks if b[2] >= life.start]
        size = -(-int(life.tensor.nbytes) // ALIGN) * ALIGN
        taken = _in_place(life, blocks, ends, no_reuse)
        if taken is not None:
            blocks.remove(taken)
            offset, size = taken[0], taken[1]
        else:
            offset = _first_gap(blocks, size)
        life.tensor.offset = offset
        blocks.append((offset, size, life.end, life.tensor))
        blocks.sort(key=lambda b: b[0])
        total[life.device] = max(total.get(life.device, 0), offset + size)
    return total


def _in_place(life: Life, blocks: Sequence[tuple[int, int, int, Tensor]], ends: dict[Tensor, int],
              no_reuse: Collection[Tensor]) -> tuple[int, int, int, Tensor] | None:
    """The block of the node's first source, if the node is its last reader and may overwrite it."""
    node = life.tensor
    if node.op not in IN_PLACE or not node.src or node.src[0] is None:
        return None
    src = node.src[0]
    root = src.root
    if src.nb != node.nb or root.op == "none" or root in no_reuse or ends.get(root) != life.start or root.nbytes != node.nbytes:
        return None
    if any(s is not None and s.root is root for s in node.src[1:]):        # x times a row of x: that row is still to be read
        return None
    return next((b for b in blocks if b[3] is root), None)


def _first_gap(blocks: Sequence[tuple[int, int, int, Tensor]], size: int) -> int:
    """The lowest offset with `size` free bytes; blocks are sorted by offset."""
    offset = 0
    for start, n, _, _ in blocks:
        if start - offset >= size:
            return offset
        offset = max(offset, start + n)
    return offset
