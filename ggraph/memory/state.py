"""What cells hold, as plain arrays: saved for all sequences or for one, and put back.

In: the cells of each stream; a state that may come from a file. Out: arrays; new cells, and the rows to which K and V of
the entries belong. A state is checked before it is used, and what is here stays as it is until the caller takes the new.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import Error
from .cells import Cells
from .line import END, Array

State = dict[str, npt.NDArray[Any]]
Owner = npt.NDArray[np.bool_]
Restored = tuple[list[Cells], Array, Array]      # new cells, entries int32 [n], their rows int32 [n]


def save(streams: Sequence[Cells], seq: int | None) -> State:
    """`cell` int32 [n]: the row (stream * size + cell) of each entry's K and V, for the saver alone; `pos` int32 [n];
    `owner` bool [n_seq, n]; `floor` int32 [n_seq]: positions below it were given away by a window.

    Of one sequence: its entries in position order, n_seq is 1. Of all: in the order of their rows.
    """
    size, n_seq = streams[0].size, streams[0].n_seq
    if seq is not None:
        line = streams[seq // n_seq].line(seq)
        return {"cell": line.cells + np.int32(seq // n_seq * size), "pos": line.pos.copy(),
                "owner": np.ones((1, len(line)), np.bool_), "floor": np.array([line.floor], np.int32)}
    used = [np.flatnonzero(c.pos >= 0).astype(np.int32) for c in streams]
    owner = np.zeros((n_seq * len(streams), sum(map(len, used))), np.bool_)
    start = 0
    for c, cells in zip(streams, used):
        owner[c.seq0:c.seq0 + n_seq, start:start + len(cells)] = c.owner[:, cells]
        start += len(cells)
    return {"cell": np.concatenate([cells + np.int32(s * size) for s, cells in enumerate(used)]),
            "pos": np.concatenate([c.pos[cells] for c, cells in zip(streams, used)]), "owner": owner,
            "floor": np.array([line.floor for c in streams for line in c.lines], np.int32)}


def restored(streams: Sequence[Cells], state: State, seq: int | None) -> Restored | None:
    """The streams with the state in place of all they hold, or of one sequence; which entries are there, and where.

    None if it does not fit; Error if it is damaged. See `KVStore.restore`.
    """
    pos, owner, floor = _checked(state)
    return _all(streams, pos, owner, floor) if seq is None else _one(streams, seq, pos, owner, floor)


def _one(streams: Sequence[Cells], seq: int, pos: Array, owner: Owner, floor: Array) -> Restored | None:
    if len(owner) != 1 or not owner.all() or (np.diff(pos) < 0).any():
        raise Error("the saved state is not that of one sequence")
    new, stream = list(streams), seq // streams[0].n_seq
    new[stream] = new[stream].copy()
    cells = new[stream].replace(seq, pos, int(floor[0]))
    if cells is None:
        return None
    return new, np.arange(len(pos) - len(cells), len(pos), dtype=np.int32), cells + np.int32(stream * new[stream].size)


def _all(streams: Sequence[Cells], pos: Array, owner: Owner, floor: Array) -> Restored | None:
    n_seq, n_max = streams[0].n_seq, streams[0].n_seq * len(streams)
    if owner[n_max:].any():
        raise Error(f"the saved state has {len(owner)} sequences, this context has {n_max} (n_seq_max)")
    if len(streams) > 1 and (owner.sum(0) > 1).any():
        raise Error("the saved state has tokens that sequences share; it needs kv_unified=True")
    owner, floor = _padded(owner, n_max), _padded(floor, n_max)
    new, rows = [], np.empty(len(pos), np.int32)
    for s, old in enumerate(streams):
        own = owner[s * n_seq:(s + 1) * n_seq]
        mine = np.flatnonzero(own.any(0))
        if len(mine) > old.size:
            return None
        cells = np.arange(len(mine), dtype=np.int32)
        new.append(Cells(old.size, n_seq, old.window, old.seq0))
        new[s].load(cells, pos[mine], own[:, mine], floor[s * n_seq:(s + 1) * n_seq])
        rows[mine] = cells + s * old.size
    return new, np.arange(len(pos), dtype=np.int32), rows


def _padded(rows: npt.NDArray[Any], n: int) -> npt.NDArray[Any]:
    """The first n rows, with zeros for those that are not there."""
    out = np.zeros((n, *rows.shape[1:]), rows.dtype)
    out[:len(rows)] = rows[:n]
    return out


def _checked(state: State) -> tuple[Array, Owner, Array]:
    try:
        pos, owner, floor = (np.asarray(state[name]) for name in ("pos", "owner", "floor"))
    except KeyError as e:
        raise Error(f"the saved state lacks {e}") from None
    if (pos.ndim, owner.ndim, floor.ndim) != (1, 2, 1) or owner.shape != (len(floor), len(pos)):
        raise Error(f"the saved state is damaged: {len(pos)} positions, owners {owner.shape}, floors {floor.shape}")
    if not (pos.dtype == floor.dtype == np.int32 and owner.dtype == np.bool_):
        raise Error(f"the saved state is damaged: types {pos.dtype}, {owner.dtype}, {floor.dtype}")
    if (pos < 0).any() or (pos == END).any() or (floor < 0).any() or not owner.any(0).all():
        raise Error("the saved state is damaged: a position out of range, or a cell without a sequence")
    return pos, owner, floor
