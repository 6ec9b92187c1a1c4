"""The weights of two files, tensor by tensor: which differ, by how much, and in which block most.

In: two GGUF files of one model. Out: a `TensorError` for each tensor that both have. Equal bytes are told by comparing them;
others are made float32 some rows at a time.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ggraph import gguf, quants

from ._compare import worst

BLOCK = 32                      # elements that are judged together, or a row where it is shorter or has another length
CHUNK = 1 << 20                 # elements that are made float32 together


@dataclass(frozen=True)
class TensorError:
    """`nmse` of B's values against A's, and of the block where it is largest: number `block` of 32 elements in the tensor, in row
    `row`. `same`: the bytes are equal. `n_blocks`: how many blocks differ at all."""
    name: str
    type_a: str
    type_b: str
    ne: list[int]
    nbytes_a: int
    nbytes_b: int
    same: bool
    nmse: float = 0.0
    max_abs: float = 0.0
    block: int = 0
    row: int = 0
    block_nmse: float = 0.0
    n_blocks: int = 0


def tensor_errors(a: gguf.File, b: gguf.File, progress: Callable[[int, int], None] | None = None) -> list[TensorError]:
    """Of the tensors that both files have in one shape, in A's order."""
    shared = [name for name, t in a.tensors.items() if name in b.tensors and b.tensors[name].ne == t.ne]
    found = []
    for i, name in enumerate(shared):
        if progress:
            progress(i, len(shared))
        found.append(tensor_error(a.tensors[name], b.tensors[name]))
    if progress:
        progress(len(shared), len(shared))
    return found


def tensor_error(a: gguf.TensorInfo, b: gguf.TensorInfo) -> TensorError:
    told = (a.name, a.type.name, b.type.name, list(a.ne), a.nbytes, b.nbytes)
    if a.type is b.type and np.array_equal(a.data, b.data):
        return TensorError(*told, True)
    width = a.ne[0] if a.ne[0] % BLOCK else BLOCK
    energy, error, top = [], [], 0.0
    for x, y in zip(pieces(a), pieces(b)):
        x, y = (np.nan_to_num(v.astype(np.float64), nan=1e30, posinf=1e30, neginf=-1e30).reshape(-1, width) for v in (x, y))
        energy.append(np.einsum("bk,bk->b", x, x))
        error.append(np.einsum("bk,bk->b", y - x, y - x))
        top = max(top, float(np.abs(y - x).max()))
    aa, dd = np.concatenate(energy), np.concatenate(error)
    block, value = worst(aa, dd)
    total = float(aa.sum())
    return TensorError(*told, False, float(dd.sum()) / total if total else float(dd.sum()), top, block, block * width // a.ne[0],
                       value, int((dd > 0).sum()))


def pieces(t: gguf.TensorInfo) -> Iterator[np.ndarray]:
    """float32 [rows, ne[0]] of some rows at a time."""
    row = t.type.row_bytes(t.ne[0])
    data = np.asarray(t.data).reshape(-1, row)
    step = max(1, CHUNK // t.ne[0])
    for start in range(0, len(data), step):
        yield quants.unpack(np.ascontiguousarray(data[start:start + step]), t.type)
