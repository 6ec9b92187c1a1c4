"""A memory beside the plainest model of it: what each sequence holds as a list, and rows that stand for K and V.

Every token has a tag of its own. A row remembers the tag written to it and the position that its K is rotated to; so the
model sees not only that the bookkeeping is consistent, but that each token would read exactly what it should.
"""
from __future__ import annotations

import copy
from typing import Any

import numpy as np

from ggraph.batch import Batch, Ubatch, split_equal, validate
from ggraph.errors import BatchError, ContextFull
from ggraph.memory import Memory, Step
from ggraph.memory.kv import KVStore, Slots, ordered
from ggraph.memory.line import Window

Held = tuple[int, int]      # position, tag
NOWHERE = (-1, -1)


def kv_stores(memory: Memory) -> list[KVStore]:
    return [s for s in memory.stores if isinstance(s, KVStore)]


def check_cells(store: KVStore, whole: bool = True) -> None:
    """Counters and lines say what `pos` and `owner` say. `whole`: and no token misses what it should see."""
    for c in store.cells:
        used = np.flatnonzero(c.pos >= 0)
        assert np.array_equal(c.pos >= 0, c.owner.any(0))
        assert c.n_used == len(used) and c.used_max == (used[-1] + 1 if len(used) else 0)
        assert not c.shift[c.pos < 0].any() and (c.has_shift or not c.shift.any())
        for i, line in enumerate(c.lines):
            own = np.flatnonzero(c.owner[i])
            want = own[np.lexsort((own, c.pos[own]))]
            assert np.array_equal(line.cells, want) and np.array_equal(line.pos, c.pos[want])
            assert np.array_equal(c.order(c.seq0 + i), want)
            assert line.complete(c.window) or not whole


def picture(memory: Memory) -> Any:
    """All that a refused operation must leave as it is."""
    return copy.deepcopy([[(c.pos, c.owner, c.shift, c.n_used, c.used_max, [(x.cells, x.pos, x.lost) for x in c.lines])
                           for c in s.cells] + [s._copies] for s in kv_stores(memory)])


def same(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(np.array_equal(a, b))


class Twin:
    def __init__(self, memory: Memory):
        self.memory, self.n_seq = memory, memory.n_seq_max
        self.held: list[list[Held]] = [[] for _ in range(self.n_seq)]
        self.rows = [[[NOWHERE] * s.size for _ in range(s.n_stream)] for s in kv_stores(memory)]
        self.n_tags = 0
        self.crowded = False        # positions may be held twice after seq_add and seq_div

    # what the tensors do

    def follow(self) -> None:
        """Run pending copies, then shifts."""
        for store, rows in zip(kv_stores(self.memory), self.rows):
            for a, b in store.take_copies():
                rows[b] = list(rows[a])
            if store.has_shift:
                for stream, cell in np.argwhere((shift := store.shifts()) != 0).tolist():
                    rot, tag = rows[stream][cell]
                    rows[stream][cell] = (rot + int(shift[stream, cell]), tag)
                store.shifted()

    def content(self, g: int, seq: int) -> list[Held]:
        """(position, tag) of a sequence's cells; K must be rotated to the position unless that is pending."""
        store = kv_stores(self.memory)[g]
        line = store._of(seq).line(seq)
        tags = [self.rows[g][store.stream(seq)][c] for c in line.cells.tolist()]
        assert store.has_shift or store.has_copies or [rot for rot, _ in tags] == line.pos.tolist()
        return [(p, tag) for p, (_, tag) in zip(line.pos.tolist(), tags)]

    def check(self) -> None:
        """Every store holds what the model holds, but for what no later token sees."""
        self.follow()
        for g, store in enumerate(kv_stores(self.memory)):
            check_cells(store)
            window = Window(store.window, store.swa_type)
            for seq, held in enumerate(self.held):
                content, last = self.content(g, seq), max((p for p, _ in held), default=-1)
                assert self.memory.seq_pos_max(seq) == store.seq_pos_max(seq) == last
                assert set(content) <= set(held) and len(set(content)) == len(content)
                assert {(p, t) for p, t in held if p >= window.first(last + 1)} <= set(content)

    # operations; each gives whether it was done

    def decode(self, rows: list[tuple[int, ...]], n_undo: int = -1) -> bool:
        """Rows of sequence sets at their next positions; step number `n_undo` is rolled back and ends it."""
        batch = Batch()
        for seqs in rows:
            batch.add(0, None, seqs)
        before = picture(self.memory)
        try:
            whole = validate(batch, 1, self.n_seq, 10**6, self.memory.seq_pos_max, same=self.memory.seq_same)
            steps = self.memory.prepare(whole)
        except BatchError:
            return False
        except ContextFull:
            assert same(before, picture(self.memory))
            self.check_full(whole)
            return False
        assert same(before, picture(self.memory))
        assert sorted(r for s in steps for r in s.ubatch.rows.tolist()) == list(range(len(rows)))
        for i, step in enumerate(steps):
            if i == n_undo:
                self.undo(step)
                break
            self.run(step)
        return True

    def check_full(self, whole: Ubatch) -> None:
        """A store of `window` cells for each sequence and an ubatch more is never the one that is full."""
        for store in kv_stores(self.memory):
            if store.window and store.size == self.memory.n_ubatch + store.window * self.n_seq // store.n_stream:
                cut = split_equal(whole, self.memory.n_ubatch, store.sequential)
                assert self.crowded or store.prepare(list(cut)) is not None

    def run(self, step: Step) -> None:
        self.memory.apply(step)
        u = step.ubatch
        tags = list(range(self.n_tags, self.n_tags + u.n_tokens))
        self.n_tags += u.n_tokens
        for i, seqs in enumerate(u.seq_ids):
            for s in seqs:
                self.held[s].append((int(u.pos[0, i]), tags[i]))
        for rows, slots in zip(self.rows, step.slots):
            for i, (stream, cell) in enumerate(places(slots)):
                rows[stream][cell] = (int(u.pos[0, i]), tags[i])
        for g, slots in enumerate(step.slots):
            for causal in (True, False):
                self.check_sight(g, u, slots, causal)
        self.memory.commit()

    def undo(self, step: Step) -> None:
        """A step that was opened and failed half-way: its rows are written already."""
        self.memory.apply(step)
        for rows, slots in zip(self.rows, step.slots):
            for stream, cell in places(slots):
                rows[stream][cell] = NOWHERE
        self.memory.rollback()

    def check_sight(self, g: int, u: Ubatch, slots: Slots, causal: bool) -> None:
        """The mask and the ordered lists name the same cells, and in them is what the token should see, in order."""
        store = kv_stores(self.memory)[g]
        window = Window(store.window, store.swa_type)
        mask = store.mask(u, slots, causal).reshape(u.n_tokens, -1)
        cells, spans = ordered(store, u, slots, causal)
        for i, (seq, p) in enumerate(zip(u.seq.tolist(), u.pos[0].tolist())):
            start, lo, hi, first = spans[:, i].tolist()
            seen = cells[start + lo:start + hi]
            base = store.stream(seq) * store.size
            assert np.array_equal(np.sort(seen), np.flatnonzero(mask[i]) + base)
            assert first == store.seq_pos_min(seq)
            flat = [row for stream in self.rows[g] for row in stream]
            want = [h for h in self.held[seq] if window.first(p) <= h[0] <= window.last(p, causal)]
            if self.crowded or not causal:
                assert {flat[c] for c in seen} <= set(self.held[seq])
            else:
                assert [flat[c] for c in seen] == sorted(want)

    def op(self, name: str, *args: int) -> bool:
        """seq_rm, seq_cp, seq_add, seq_div: on all stores, or refused by all."""
        before = picture(self.memory)
        done: bool = getattr(self.memory, name)(*args)
        if done:
            getattr(self, name)(*args)
        else:
            assert same(before, picture(self.memory))
            self.check_refusal(name, *args)
        return done

    def check_refusal(self, name: str, *args: int) -> None:
        """It was refused for a reason: something that the next token should see afterwards is not there."""
        if name != "seq_rm" or args[0] < 0:
            return
        seq = args[0]
        rest = [h for h in self.held[seq] if not inside(h[0], *args[1:])]
        last = max((p for p, _ in rest), default=-1)
        for g, store in enumerate(kv_stores(self.memory)):
            first = Window(store.window, store.swa_type).first(last + 1)
            if not {h for h in rest if h[0] >= min(first, last)} <= set(self.content(g, seq)):
                return
        raise AssertionError(f"{name}{args} was refused without need")

    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        for s in range(self.n_seq) if seq < 0 else [seq]:
            self.held[s] = [h for h in self.held[s] if not inside(h[0], p0, p1)]

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        if src != dst:
            rest = [h for h in self.held[dst] if not inside(h[0], p0, p1)]
            self.held[dst] = sorted(rest + [h for h in self.held[src] if inside(h[0], p0, p1)])

    def seq_keep(self, seq: int) -> None:
        self.memory.seq_keep(seq)
        self.held = [h if s == seq else [] for s, h in enumerate(self.held)]

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        self.move(seq, p0, p1, lambda p: p + delta)

    def seq_div(self, seq: int, p0: int, p1: int, d: int) -> None:
        self.move(seq, p0, p1, lambda p: p // d)

    def move(self, seq: int, p0: int, p1: int, to: Any) -> None:
        moved = [(to(p) if inside(p, p0, p1) else p, t) for p, t in self.held[seq]]
        self.held[seq] = sorted(h for h in moved if h[0] >= 0)
        self.crowded |= len({p for p, _ in self.held[seq]}) < len(self.held[seq])

    # save and load

    def save(self, seq: int | None) -> Any:
        self.follow()
        states = self.memory.state(seq)
        flat = [[row for stream in rows for row in stream] for rows in self.rows]
        kept = [[flat[g][c] for c in state.pop("cell").tolist()] for g, state in enumerate(states)]
        held = copy.deepcopy(self.held) if seq is None else list(self.held[seq])
        return states, kept, held

    def load(self, saved: Any, seq: int | None) -> bool:
        self.follow()
        states, content, held = saved
        before = picture(self.memory)
        places = self.memory.restore(states, seq)
        if places is None:
            assert same(before, picture(self.memory))
            return False
        for store, rows, data, where in zip(kv_stores(self.memory), self.rows, content, places):
            kept = where[where >= 0].tolist()
            assert len(set(kept)) == len(kept)
            for entry, row in zip(data, where.tolist()):
                if row >= 0:
                    rows[row // store.size][row % store.size] = entry
        if seq is None:
            self.held = copy.deepcopy(held)
        else:
            self.held[seq] = list(held)
        return True


def places(slots: Slots) -> list[tuple[int, int]]:
    """(stream, cell) of each token."""
    return [(s, c) for s, cells in zip(slots.streams.tolist(), slots.cells.tolist()) for c in cells]


def inside(p: int, p0: int, p1: int) -> bool:
    return p >= p0 and (p1 < 0 or p < p1)
