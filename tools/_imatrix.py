"""Importance matrices as files: llama.cpp's GGUF form, read and written, and its older form, read.

In and out: `Matrix`, for each tensor the sum of squared activations of each column and how many rows were summed; experts apart.
"""
from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import ggraph
from ggraph import dtypes, gguf, writer

SUMS, COUNTS = ".in_sum2", ".counts"
MAX_OLD_NAME = 4096
OLD_CHUNK = 512                 # tokens of a call, which the old form does not tell; it only matters when both forms are summed


@dataclass
class Entry:
    """`sums` float32 [n, n_per_row]; `counts` float32 [n]. n is 1, or the number of experts; where a matrix has a third axis
    that is not experts (one matrix a head), a row holds all of them."""
    sums: npt.NDArray[np.float32]
    counts: npt.NDArray[np.float32]

    @property
    def mean(self) -> npt.NDArray[np.float32]:
        """[n_matrices, n_per_row]: the mean square of each column; 1 for an expert that was never chosen."""
        with np.errstate(all="ignore"):
            n = self.counts[:, None]
            out: npt.NDArray[np.float32] = np.where(n > 0, self.sums / n, 1).astype(np.float32)
        return out


@dataclass
class Matrix:
    """`chunk_count` chunks of `chunk_size` tokens of `datasets` went in."""
    entries: dict[str, Entry] = field(default_factory=dict)
    datasets: list[str] = field(default_factory=list)
    chunk_count: int = 0
    chunk_size: int = 0

    def add(self, other: Matrix) -> None:
        """Sum up; `ggraph.Error` if both have a tensor in different shapes."""
        for name, entry in other.entries.items():
            mine = self.entries.get(name)
            if mine is None:
                self.entries[name] = Entry(entry.sums.copy(), entry.counts.copy())
            elif mine.sums.shape != entry.sums.shape:
                raise ggraph.Error(f"{name} has the shape {list(mine.sums.shape)} in one file and {list(entry.sums.shape)} in "
                                   "another: they are not of the same model")
            else:
                mine.sums += entry.sums
                mine.counts += entry.counts
        self.datasets += [name for name in other.datasets if name not in self.datasets]
        self.chunk_count += other.chunk_count
        self.chunk_size = self.chunk_size or other.chunk_size


def merged(paths: Iterable[str | Path]) -> Matrix:
    """The sum of several files."""
    matrix = Matrix()
    for path in paths:
        matrix.add(read(path))
    return matrix


def read(path: str | Path) -> Matrix:
    """A file of either form. `ggraph.Error` if it is neither, or holds what makes no sense."""
    with open(path, "rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    matrix = _read_gguf(path) if is_gguf else _read_old(path)
    for name, entry in matrix.entries.items():
        if not np.isfinite(entry.sums).all() or (entry.sums < 0).any() or not np.isfinite(entry.counts).all():
            raise ggraph.Error(f"{path}: {name} holds values that are no sums of squares: it is damaged, make it again")
    if not matrix.entries:
        raise ggraph.Error(f"{path}: there is nothing in it")
    return matrix


def _read_gguf(path: str | Path) -> Matrix:
    with gguf.File(path) as file:
        if file.kv.get("general.type") != "imatrix":
            raise ggraph.Error(f"{path} is no importance matrix: its general.type is {file.kv.get('general.type')!r}")
        matrix = Matrix(datasets=list(file.kv.get("imatrix.datasets", [])), chunk_count=int(file.kv.get("imatrix.chunk_count", 0)),
                        chunk_size=int(file.kv.get("imatrix.chunk_size", 0)))
        for name, info in file.tensors.items():
            if not name.endswith(SUMS):
                continue
            base = name.removesuffix(SUMS)
            counts = file.tensors.get(base + COUNTS)
            if counts is None or info.type != dtypes.F32 or counts.type != dtypes.F32 or info.n_elements % counts.n_elements:
                raise ggraph.Error(f"{path}: the sums of {base} have no counts that fit them: it is damaged, make it again")
            values = (t.data.view(np.float32).copy() for t in (info, counts))
            sums, count = values
            matrix.entries[base] = Entry(sums.reshape(len(count), -1), count)
    return matrix


def _read_old(path: str | Path) -> Matrix:
    """n entries of (name, calls, mean-square sums), then the number of chunks and the dataset. Experts lie side by side."""
    data, pos = Path(path).read_bytes(), 0

    def take(code: str) -> Any:
        nonlocal pos
        values = struct.unpack_from(code, data, pos)
        pos += struct.calcsize(code)
        return values[0]
    matrix = Matrix()
    try:
        for _ in range(take("<i")):
            n = take("<i")
            if not 0 < n <= MAX_OLD_NAME:
                raise ValueError
            name = take(f"<{n}s").decode()
            calls, size = take("<i"), take("<i")
            sums = np.frombuffer(take(f"<{4 * size}s"), np.float32).copy()
            matrix.entries[name] = Entry(sums[None] * OLD_CHUNK, np.full(1, max(calls, 0) * OLD_CHUNK, np.float32))
        if pos < len(data):
            matrix.chunk_count = take("<i")
            matrix.datasets = [take(f"<{take('<i')}s").decode()]
    except (struct.error, ValueError):
        raise ggraph.Error(f"{path} is no importance matrix, or cut short") from None
    return matrix


def write(matrix: Matrix, path: str | Path) -> None:
    """In llama.cpp's GGUF form."""
    kv = {"general.type": writer.encode("STRING", "imatrix"), "imatrix.datasets": writer.encode("ARRAY:STRING", matrix.datasets),
          "imatrix.chunk_count": writer.encode("UINT32", matrix.chunk_count),
          "imatrix.chunk_size": writer.encode("UINT32", matrix.chunk_size)}
    specs, data = [], []
    for name, entry in sorted(matrix.entries.items()):
        n, width = entry.sums.shape
        specs += [writer.Spec(name + SUMS, (width, n), dtypes.F32), writer.Spec(name + COUNTS, (1, n), dtypes.F32)]
        data += [entry.sums, entry.counts]
    with writer.replacing(path) as out:
        made = writer.Writer(out, kv, specs)
        for values in data:
            made.write(np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8))
        made.finish()


def importance(entry: Entry, name: str, ne: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """[n_matrices, n_per_row] for a tensor of that shape. `ggraph.Error` if the entry is not for it."""
    n = ne[2] if len(ne) > 2 else 1
    if entry.sums.size != ne[0] * n:
        raise ggraph.Error(f"the importance matrix has {entry.sums.size} values for {name}, which needs {ne[0] * n}: "
                           "it is of another model")
    return entry.mean.reshape(n, ne[0])
