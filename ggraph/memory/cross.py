"""What an encoder made of the text of each sequence, which its decoder attends to.

In: hidden states, from `Context.process("encode", ..)`. Out: those of the sequences of a ubatch. They stay until the next text of
the sequence; a copy of a sequence gets them too.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ..batch import Seqs
from ..errors import BatchError

Hidden = npt.NDArray[np.float32]


class Cross:
    """`states`: sequence -> float32 [n, n_embd]."""

    def __init__(self) -> None:
        self.states: dict[int, Hidden] = {}

    def put(self, seq_ids: Sequence[Seqs], rows: Hidden) -> None:
        """The sequences of each row; in place of what they had."""
        for s in set[int]().union(*seq_ids):
            self.states[s] = rows[[s in seqs for seqs in seq_ids]]

    def check(self, seq_ids: Sequence[Seqs]) -> None:
        """BatchError unless all of these sequences have something."""
        if unknown := set[int]().union(*seq_ids) - self.states.keys():
            raise BatchError(f"sequence {min(unknown)} has no text to answer; give it one with process(\"encode\", ..) first")

    def copy(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Of a part of a sequence as of all."""
        if src in self.states:
            self.states[dst] = self.states[src]

    def count(self, seqs: Iterable[int]) -> int:
        """Rows of all of these."""
        return sum(len(self.states[s]) for s in set(seqs))

    def of(self, seq: npt.NDArray[np.int32]) -> tuple[Hidden, Hidden]:
        """Of tokens of these sequences, int32 [n_tokens]: the rows of all of them, and the mask [n_tokens, n]: 0 for rows of the
        token's own sequence, -inf for others."""
        seqs = sorted(set(seq.tolist()))
        owner = np.concatenate([np.full(len(self.states[s]), s, np.int32) for s in seqs])
        mask = np.where(owner[None, :] == seq[:, None], 0, -np.inf).astype(np.float32)
        return np.concatenate([self.states[s] for s in seqs]), mask
