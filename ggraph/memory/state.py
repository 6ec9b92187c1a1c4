"""What cells hold, as plain arrays: saved for all sequences or for one, and put back.

In: the cells of each stream; a state that may come from a file. Out: arrays; new cells, and the rows to which K and V
of the entries go. A state is checked before it is used, and what is here stays until the caller takes the new cells.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import Error
from .cells import Cells
from .line import END, Array, Line, Ranges, joined

State = dict[str, npt.NDArray[Any]]
Owner = npt.NDArray[np.bool_]
Restored = tuple[list[Cells], Array]     # the new streams, and the row of each entry, int32 [n]


def save(streams: Sequence[Cells], seq: int | None) -> State:
    """`cell` int32 [n]: row (stream * size + cell) of each entry's K and V, of use to the saver alone; `pos` int32 [n];
    `owner` bool [n_seq, n]; `lost` int32 [n_lost, 3]: sequence, start and stop of positions that a window gave away.

    Of one sequence: its entries in position order, n_seq is 1. Of all: in the order of their rows.
    """
    size, n_seq = streams[0].size, streams[0].n_seq
    if seq is not None:
        line = streams[seq // n_seq].line(seq)
        return {"cell": line.cells + np.int32(seq // n_seq * size), "pos": line.pos.copy(),
                "owner": np.ones((1, len(line)), np.bool_), "lost": _lost([line])}
    used = [np.flatnonzero(c.pos >= 0).astype(np.int32) for c in streams]
    owner = np.zeros((n_seq * len(streams), sum(map(len, used))), np.bool_)
    start = 0
    for c, cells in zip(streams, used):
        owner[c.seq0:c.seq0 + n_seq, start:start + len(cells)] = c.owner[:, cells]
        start += len(cells)
    return {"cell": np.concatenate([cells + np.int32(s * size) for s, cells in enumerate(used)]),
            "pos": np.concatenate([c.pos[cells] for c, cells in zip(streams, used)]),
            "owner": owner, "lost": _lost([line for c in streams for line in c.lines])}


def ends(state: State) -> dict[int, int]:
    """The last position of each sequence, of cells or of rows."""
    if "owner" in state:
        return {s: int(state["pos"][own].max()) for s, own in enumerate(state["owner"]) if own.any()}
    return dict(zip(state["seq"].tolist(), state["pos"].tolist()))


def _lost(lines: Sequence[Line]) -> Array:
    return np.array([(s, a, b) for s, line in enumerate(lines) for a, b in line.lost], np.int32).reshape(-1, 3)


def restored(streams: Sequence[Cells], state: State, seq: int | None) -> Restored | None:
    """The streams with the state in place of all they hold, or of one sequence.

    None if it does not fit; Error if it is damaged. See `KVStore.restore`.
    """
    pos, owner, lost = _checked(state)
    gone = [joined((a, b) for s, a, b in lost.tolist() if s == i) for i in range(len(owner))]
    return _all(streams, pos, owner, gone) if seq is None else _one(streams, seq, pos, owner, gone)


def _one(streams: Sequence[Cells], seq: int, pos: Array, owner: Owner, lost: Sequence[Ranges]) -> Restored | None:
    if len(owner) != 1 or (np.diff(pos) < 0).any():
        raise Error("the saved state is not that of one sequence")
    new, stream = list(streams), seq // streams[0].n_seq
    new[stream] = new[stream].copy()
    cells = new[stream].replace(seq, pos, lost[0])
    if cells is None:
        return None
    return new, np.where(cells < 0, np.int32(-1), cells + np.int32(stream * new[stream].size))


def _all(streams: Sequence[Cells], pos: Array, owner: Owner, lost: Sequence[Ranges]) -> Restored | None:
    n_seq, n_max = streams[0].n_seq, streams[0].n_seq * len(streams)
    if owner[n_max:].any() or any(lost[n_max:]):
        raise Error(f"the saved state has {len(owner)} sequences, this context has {n_max} (n_seq_max)")
    if len(streams) > 1 and (owner.sum(0) > 1).any():
        raise Error("the saved state has tokens that sequences share; it needs kv_unified=True")
    short = max(n_max - len(owner), 0)
    owner, lost = np.pad(owner[:n_max], ((0, short), (0, 0))), [*lost[:n_max], *[()] * short]
    new, rows = [], np.empty(len(pos), np.int32)
    for s, old in enumerate(streams):
        seqs = slice(s * n_seq, (s + 1) * n_seq)
        mine = np.flatnonzero(owner[seqs].any(0))
        if len(mine) > old.size:
            return None
        cells = np.arange(len(mine), dtype=np.int32)
        new.append(Cells(old.size, n_seq, old.window, old.seq0))
        new[s].load(cells, pos[mine], owner[seqs, mine], lost[seqs])
        rows[mine] = cells + s * old.size
    return new, rows


def _checked(state: State) -> tuple[Array, Owner, Array]:
    try:
        pos, owner, lost = (np.asarray(state[name]) for name in ("pos", "owner", "lost"))
    except KeyError as e:
        raise Error(f"the saved state lacks {e}") from None
    if not (pos.dtype == lost.dtype == np.int32 and owner.dtype == np.bool_):
        raise Error(f"the saved state is damaged: its types are {pos.dtype}, {owner.dtype}, {lost.dtype}")
    if pos.ndim != 1 or owner.ndim != 2 or owner.shape[1] != len(pos) or lost.ndim != 2 or lost.shape[1] != 3:
        raise Error(f"the saved state is damaged: its shapes are {pos.shape}, {owner.shape}, {lost.shape}")
    if (pos < 0).any() or (pos == END).any() or not owner.any(0).all():
        raise Error("the saved state is damaged: it has a position out of range, or one of no sequence")
    seq, start, stop = lost.T
    if (seq < 0).any() or (seq >= len(owner)).any() or (start < 0).any() or (stop <= start).any():
        raise Error("the saved state is damaged: it has lost positions that cannot be")
    return pos, owner, lost
