"""Save and load a memory: its bookkeeping arrays and the cache rows they name, in one .npz file or as arrays.

In: a memory and a path. Out: a file, or a memory whose sequences are as they were. A file
that does not fit the model, the cache types or the free cells is refused and nothing changes.
"""
from __future__ import annotations

import json
import os
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from .errors import ContextFull, Error
from .memory.layers import LayerMemory

VERSION = 1
Arrays = dict[str, np.ndarray]


def _header(memory: LayerMemory, seq: int | None) -> dict[str, Any]:
    if memory.cross is not None:
        raise Error("a state does not hold what an encoder made of the text; encode and decode it again in the other Context")
    return {"version": VERSION, "arch": memory.arch, "whole": seq is None,
            "tensors": [[t.name, t.type.name, int(t.ne[0])] for t in memory.tensors()]}


def save(memory: LayerMemory, path: Path, seq: int | None) -> None:
    if path.is_dir() or not path.parent.is_dir():
        raise Error(f"{path} is a folder, not a file" if path.is_dir() else f"there is no folder {path.parent}")
    arrays = collect(memory, seq)
    fd, temp = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(fd, "wb") as f:
            np.savez(f, allow_pickle=False, **arrays)
        os.replace(temp, path)
    except BaseException:
        os.unlink(temp)
        raise


def collect(memory: LayerMemory, seq: int | None) -> Arrays:
    """All sequences' memory, or one's, as arrays of their own."""
    arrays: Arrays = {"header": np.frombuffer(json.dumps(_header(memory, seq)).encode(), np.uint8)}
    for i, (state, group) in enumerate(zip(memory.state(seq), memory.groups)):
        arrays |= {f"{i}.{name}": a for name, a in state.items()}
        arrays |= {f"{i}.{t.name}": group.read_rows(t, state["cell"]) for t in group.tensors()}
    return arrays


def load(memory: LayerMemory, path: Path, seq: int | None) -> None:
    try:
        with open(path, "rb") as f, np.load(f, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, KeyError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error) as e:
        raise Error(f"{path} is no saved state: {e}") from e
    put(memory, arrays, seq, str(path))


def put(memory: LayerMemory, arrays: Arrays, seq: int | None, source: str) -> None:
    """What `collect` gave, in place of what is here; `source` names it in errors. Error, and nothing changed, if it is unfit."""
    if seq is not None:
        memory.check(seq)
    try:
        header = dict(json.loads(np.asarray(arrays["header"]).tobytes()))
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise Error(f"{source} is no saved state: {e}") from e
    want = _header(memory, seq)
    for name in want:
        if header.get(name) != want[name]:
            raise Error(f"{source} does not fit this Context: its {name} is {header.get(name)}, needed is {want[name]}")
    states = [{n.split(".", 1)[1]: a for n, a in arrays.items() if n.startswith(f"{i}.") and "cache_" not in n}
              for i in range(len(memory.groups))]
    _check_rows(memory, source, arrays, states)
    rows = memory.restore(states, seq)
    if rows is None:
        raise ContextFull(f"{source} holds more tokens than this Context has free cells; nothing was loaded")
    try:
        for i, (group, to) in enumerate(zip(memory.groups, rows)):
            kept = to >= 0
            for t in group.tensors():
                group.write_rows(t, to[kept], arrays[f"{i}.{t.name}"][kept])
    except BaseException:
        memory.forget(seq)          # of which only a part is here
        raise


def _check_rows(memory: LayerMemory, source: str, arrays: Arrays, states: list[Arrays]) -> None:
    for i, (group, state) in enumerate(zip(memory.groups, states)):
        for t in group.tensors():
            data = arrays.get(f"{i}.{t.name}")
            n = state["cell"].shape if "cell" in state else ()
            if len(n) != 1 or data is None or data.dtype != np.uint8 or data.shape != (*n, t.nb[1]):
                raise Error(f"{source} is damaged: rows of {t.name} are missing or of the wrong size")
