"""The memory of a context: an ordered list of stores, one for each group of layers, that act as one.

In: a checked batch, operations on sequences. Out: steps (an ubatch and its place in every store), or a refusal that
changes nothing anywhere. A store is bookkeeping for layers that remember alike: cells of K and V, with a window or
without, or rows of recurrent state. Adding one needs a class with the methods of `Store` and a place in the list;
a model that mixes kinds needs nothing more. It knows no tensors and no graphs.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol

from ..batch import Splitter, Ubatch, split_equal, split_simple
from ..errors import BatchError, ContextFull, Error, integer, integers
from .state import State, ends


@dataclass(frozen=True, slots=True)
class Step:
    """One graph run: what it computes and where each store keeps it."""
    ubatch: Ubatch
    slots: tuple[Any, ...]      # one per store, in the stores' order; a KV store's are `kv.Slots`


class Store(Protocol):
    """What a memory asks of the store of one layer group.

    A range is p0 <= p < p1; p0 < 0: from the start, p1 < 0: to the end. What a store may refuse comes in pairs: `can_x`
    answers and changes nothing; `x` does it, or gives False and changes nothing.
    """
    @property
    def equal(self) -> bool:
        """Ubatches must hold as many rows of each sequence set."""

    @property
    def sequential(self) -> bool:
        """And the sets must be single sequences with consecutive ids."""

    def prepare(self, ubatches: Sequence[Ubatch]) -> Sequence[Any] | None:
        """A place for each, as if run one after the other; None if there is none. Changes nothing."""

    def apply(self, ubatch: Ubatch, slots: Any, /) -> None: ...
    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    def shortage(self, batch: Ubatch) -> str:
        """Why `prepare` gives None for this batch, with both numbers."""

    def can_seq_rm(self, seq: int, p0: int, p1: int) -> bool: ...
    def can_seq_cp(self, src: int, dst: int, p0: int, p1: int) -> bool: ...
    def can_seq_add(self, seq: int, p0: int, p1: int, delta: int) -> bool: ...
    def can_seq_div(self, seq: int, p0: int, p1: int, d: int) -> bool: ...
    def seq_rm(self, seq: int, p0: int, p1: int) -> bool: ...
    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> bool: ...
    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> bool: ...
    def seq_div(self, seq: int, p0: int, p1: int, d: int) -> bool: ...
    def seq_keep(self, seq: int) -> None: ...
    def seq_pos_min(self, seq: int) -> int: ...
    def seq_pos_max(self, seq: int) -> int: ...
    def seq_same(self, a: int, b: int) -> bool: ...
    def clear(self) -> None: ...

    def state(self, seq: int | None = None) -> State: ...
    def can_restore(self, state: State, seq: int | None = None) -> bool:
        """Error if the state is damaged."""

    def restore(self, state: State, seq: int | None = None) -> Any:
        """What the caller needs to put the tensors' rows back; None, and nothing changed, if they do not fit.

        Error, and nothing changed, if the state is damaged.
        """


class Memory:
    """All stores of a context, which share its sequences and its ubatches. Without a store it only splits batches.

    `mirrors` are called with each `seq_cp` that was done: by whoever keeps a memory of the same sequences.
    """

    can_shift = True                # positions may be moved

    def __init__(self, stores: Sequence[Store], n_seq_max: int, n_ubatch: int):
        self.stores, self.n_seq_max, self.n_ubatch = list(stores), n_seq_max, n_ubatch
        self._cuts = self._splitters()
        self._open = self._done = False         # a step is, and `commit` has begun to close it
        self.mirrors: list[Callable[[int, int, int, int], object]] = []

    # one step: prepare the batch, then for each step apply, run, commit or rollback

    def prepare(self, batch: Ubatch) -> list[Step]:
        """Cut a checked batch and find a place for all of it in every store; else ContextFull, and nothing changed."""
        if self._open:          # an interrupt came while the step before was closed
            self.rollback()
        for cut in self._cuts:
            ubatches = list(cut(batch, self.n_ubatch))
            plans = [store.prepare(ubatches) for store in self.stores]
            if None not in plans:
                return list(map(Step, ubatches, zip(*plans) if plans else repeat(())))
        store = self.stores[plans.index(None)]
        raise ContextFull(f"the context is full: {store.shortage(batch)}")

    def _splitters(self) -> list[Splitter]:
        """Free rows if every store takes them; else, or if they find no place, sequences in step."""
        def equal(batch: Ubatch, n_ubatch: int) -> Any:
            return split_equal(batch, n_ubatch, any(s.sequential for s in self.stores))
        return [equal] if any(s.equal for s in self.stores) else [split_simple, equal]

    def apply(self, step: Step) -> None:
        """Open a step: the only call of a step that changes memory."""
        self._open = True
        try:
            for store, slots in zip(self.stores, step.slots):
                store.apply(step.ubatch, slots)
        except BaseException:
            self.rollback()
            raise

    def commit(self) -> None:
        """Close the step: its tokens stay, in every store, also where an interrupt comes between two of them."""
        self._done = True
        self.rollback()

    def rollback(self) -> None:
        """Close a step as if it had not been, or bring a `commit` that was interrupted to its end; without an open step nothing
        happens."""
        for store in self.stores:
            if self._done:
                store.commit()
            else:
                store.rollback()
        self._open = self._done = False

    # operations on sequences, on all stores or on none

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> bool:
        """Take positions p0 <= p < p1 out of a sequence, of every sequence if seq is -1.

        False, and nothing changed, if a store cannot: a window or a state may know too little of what came before p0.
        """
        if seq != -1:
            self.check(seq)
        integers(p0=p0, p1=p1)
        seqs = range(self.n_seq_max) if seq == -1 else [seq]
        if not all(store.can_seq_rm(s, p0, p1) for store in self.stores for s in seqs):
            return False
        return all(store.seq_rm(s, p0, p1) for store in self.stores for s in seqs)

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> bool:
        """`dst` gets what `src` has at positions p0 <= p < p1, in place of what it had there. False as in `seq_rm`."""
        self.check(src, dst)
        integers(p0=p0, p1=p1)
        if not all(store.can_seq_cp(src, dst, p0, p1) for store in self.stores):
            return False
        done = all(store.seq_cp(src, dst, p0, p1) for store in self.stores)
        for mirror in self.mirrors:
            mirror(src, dst, p0, p1)
        return done

    def seq_keep(self, seq: int) -> None:
        """Take out all other sequences."""
        self.check(seq)
        for store in self.stores:
            store.seq_keep(seq)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> bool:
        """Move positions p0 <= p < p1 by delta; those that become negative are removed. False as in `seq_rm`, where another
        sequence shares one of them, and where K cannot follow its position."""
        self.check(seq)
        integers(p0=p0, p1=p1, delta=delta)
        if not self.can_shift or not all(store.can_seq_add(seq, p0, p1, delta) for store in self.stores):
            return False
        return all(store.seq_add(seq, p0, p1, delta) for store in self.stores)

    def seq_div(self, seq: int, p0: int, p1: int, d: int) -> bool:
        """Divide positions p0 <= p < p1 by d > 0. False as in `seq_add`."""
        self.check(seq)
        integers(p0=p0, p1=p1, d=d)
        if not self.can_shift or not all(store.can_seq_div(seq, p0, p1, d) for store in self.stores):
            return False
        return all(store.seq_div(seq, p0, p1, d) for store in self.stores)

    def seq_pos_min(self, seq: int) -> int:
        """The first position that every store still has, -1 for none."""
        self.check(seq)
        return max((store.seq_pos_min(seq) for store in self.stores), default=-1)

    def seq_pos_max(self, seq: int) -> int:
        """The last position, -1 for none; all stores agree on it."""
        self.check(seq)
        return max((store.seq_pos_max(seq) for store in self.stores), default=-1)

    def seq_same(self, a: int, b: int) -> bool:
        """Both sequences hold the same tokens, so that they may share a new one."""
        self.check(a, b)
        return all(store.seq_same(a, b) for store in self.stores)

    def clear(self) -> None:
        for store in self.stores:
            store.clear()
        self._open = self._done = False

    # save and load

    def state(self, seq: int | None = None) -> list[State]:
        """What each store remembers, of one sequence or of all."""
        if seq is not None:
            self.check(seq)
        return [store.state(seq) for store in self.stores]

    def restore(self, states: Sequence[State], seq: int | None = None) -> list[Any] | None:
        """Put a saved state in place of what is here, of one sequence or of all; gives each store's `restore`.

        None, and nothing changed, if a store has no room. Error, and nothing changed, if the state is damaged.
        """
        if seq is not None:
            self.check(seq)
        if len(states) != len(self.stores):
            raise Error(f"the saved state is of {len(states)} stores, this context has {len(self.stores)}")
        if not all(store.can_restore(state, seq) for store, state in zip(self.stores, states)):
            return None
        if any(ends(state) != ends(states[0]) for state in states[1:]):
            raise Error("the saved state is damaged: its layers end at different positions")
        try:
            return [store.restore(state, seq) for store, state in zip(self.stores, states)]
        except BaseException:
            self.forget(seq)
            raise

    def forget(self, seq: int | None = None) -> None:
        """Take out one sequence, or all and what is still to be shifted or copied: of which not all stores know the same."""
        if seq is None:
            self.clear()
        else:
            self.seq_rm(seq)

    def check(self, *seqs: int) -> None:
        """BatchError unless there are these sequences."""
        for s in seqs:
            if not 0 <= integer("a sequence", s) < self.n_seq_max:
                raise BatchError(f"there is no sequence {s}; this context has 0 to {self.n_seq_max - 1} (n_seq_max)")
