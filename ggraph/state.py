"""Save and load the memory of a Context: bookkeeping arrays and the cache rows they name, in one .npz file.

In: a Context and a path. Out: a file, or a Context whose sequences are as they were. A file that does not fit the model, the
cache types or the free cells is refused and nothing changes.
"""
from __future__ import annotations

import json
import os
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import ContextFull, Error

if TYPE_CHECKING:
    from .context import Context

VERSION = 1


def _header(ctx: Context, seq: int | None) -> dict[str, Any]:
    cp = ctx.cparams
    return {"version": VERSION, "arch": ctx.model.hparams.arch, "whole": seq is None, "type_k": cp.type_k.name,
            "type_v": cp.type_v.name, "tensors": [[t.name, int(t.ne[0])] for t in ctx.memory.tensors()]}


def save(ctx: Context, path: Path, seq: int | None) -> None:
    host = ctx.backends[-1]
    arrays: dict[str, np.ndarray] = {"header": np.frombuffer(json.dumps(_header(ctx, seq)).encode(), np.uint8)}
    for i, (state, group) in enumerate(zip(ctx.memory.state(seq), ctx.memory.kv)):
        arrays |= {f"{i}.{name}": a for name, a in state.items()}
        arrays |= {f"{i}.{t.name}": group.read_rows(host, t, state["cell"]) for t in group.tensors()}
    fd, temp = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(fd, "wb") as f:
            np.savez(f, allow_pickle=False, **arrays)
        os.replace(temp, path)
    except BaseException:
        os.unlink(temp)
        raise


def load(ctx: Context, path: Path, seq: int | None) -> None:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        header = json.loads(arrays.pop("header").tobytes())
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as e:
        raise Error(f"{path} is no saved state: {e}") from e
    want = _header(ctx, seq)
    for name in want:
        if header.get(name) != want[name]:
            raise Error(f"{path} does not fit this Context: its {name} is {header.get(name)}, needed is {want[name]}")
    states = [{n.split(".", 1)[1]: a for n, a in arrays.items() if n.startswith(f"{i}.") and "cache_" not in n}
              for i in range(len(ctx.memory.kv))]
    _check_rows(ctx, path, arrays, states)
    rows = ctx.memory.restore(states, seq)
    if rows is None:
        raise ContextFull(f"{path} holds more tokens than this Context has free cells; nothing was loaded")
    for i, (group, to) in enumerate(zip(ctx.memory.kv, rows)):
        kept = to >= 0
        for t in group.tensors():
            group.write_rows(ctx.backends[-1], t, to[kept], arrays[f"{i}.{t.name}"][kept])


def _check_rows(ctx: Context, path: Path, arrays: dict[str, np.ndarray], states: list[dict[str, np.ndarray]]) -> None:
    for i, (group, state) in enumerate(zip(ctx.memory.kv, states)):
        for t in group.tensors():
            data = arrays.get(f"{i}.{t.name}")
            if "cell" not in state or data is None or data.dtype != np.uint8 or data.shape != (len(state["cell"]), t.nb[1]):
                raise Error(f"{path} is damaged: rows of {t.name} are missing or of the wrong size")
