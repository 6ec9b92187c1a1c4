"""Drafts of the model's own block for next-token prediction (MTP), which sees the hidden states of the text.

In: a Context whose model has such a block. Out: a drafter for each of its sequences. A second Context over the same model runs
the block; it follows the first one, batch by batch, so that the block has seen the text, too.
"""
from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from ..batch import Batch, Ubatch
from ..context import Context
from ..errors import ContextFull, Error, expect, integers, numbers
from ..sampling import Sampler
from .speculative import guesses


class Nextn:
    """The block of a Context's model, with a cache of its own, behind all sequences of that Context.

    What a sequence held before, or was loaded, the block has not seen: its guesses are worse for it, and the text is the same.
    So it is with what it forgets because its cells are short. Errors: `ModelError` if there is no such block.
    """

    def __init__(self, ctx: Context):
        expect("ctx", ctx, Context, "a Context")
        self.text, cp = ctx, ctx.cparams
        self.ctx = Context(ctx.model, mtp=True, n_ctx=cp.n_ctx, n_batch=cp.n_batch, n_ubatch=cp.n_ubatch, n_seq_max=cp.n_seq_max,
                           kv_unified=cp.kv_unified, type_k=cp.type_k.name, type_v=cp.type_v.name, flash_attn=cp.flash_attn,
                           n_threads=cp.n_threads, n_threads_batch=cp.n_threads_batch)
        self.hidden: list[dict[int, np.ndarray]] = [{} for _ in range(cp.n_seq_max)]       # by position, of the last batch
        ctx.follow(self.follow)
        ctx.memory.mirrors.append(self.copy)

    def follow(self, u: Ubatch, hidden: np.ndarray) -> None:
        """Let the block see a batch that was done: each token with the hidden state of the one before it."""
        batch, begun = Batch(), set[int]()
        before = [dict(known) for known in self.hidden]
        for i, seqs in enumerate(u.seq_ids):
            pos = int(u.pos[0, i])
            if new := {*seqs} - begun:
                self._begin(sorted(new), pos)
            begun |= new
            if u.token is not None:
                axes = tuple(u.pos[:, i].tolist()) if len(u.pos) > 1 else pos
                batch.add(int(u.token[i]), axes, seqs, embd=before[seqs[0]].get(pos - 1, np.zeros_like(hidden[i])))
            for s in seqs:
                before[s] = {pos: hidden[i]}
                self.hidden[s][pos] = hidden[i].copy()
        if len(batch):
            self._process(batch)

    def _process(self, batch: Batch) -> None:
        """As there is room: with all that is remembered, without what the texts have given up, with nothing, or not at all."""
        for forget in (None, self._trim, self.ctx.memory.clear):
            if forget:
                forget()
            with contextlib.suppress(ContextFull):
                self.ctx.process("decode", batch)
                return

    def _trim(self) -> None:
        """Forget what is behind the ends of the texts: it is in memory until a text goes on there."""
        for s in range(len(self.hidden)):
            self.ctx.memory.seq_rm(s, self.text.memory.seq_pos_max(s) + 1, -1)

    def _begin(self, seqs: Sequence[int], pos: int) -> None:
        """Make room for tokens from `pos` on, which these sequences share, or each has alone."""
        memory = self.ctx.memory
        for s in seqs:
            self.back(s, pos)
            self.hidden[s] = {}
            if not memory.seq_same(seqs[0], s):
                memory.seq_rm(s, -1, -1)
                memory.seq_cp(seqs[0], s)

    def copy(self, src: int, dst: int, p0: int, p1: int) -> None:
        """A sequence got what another one holds."""
        self.ctx.memory.seq_cp(src, dst, p0, p1)
        self.hidden[dst] = dict(self.hidden[src])

    def back(self, seq: int, pos: int) -> None:
        """Forget what a sequence has from this position on; all of it, where there is a gap before."""
        memory = self.ctx.memory
        memory.seq_rm(seq, pos if memory.seq_pos_max(seq) >= pos - 1 else -1, -1)

    def logits(self, seq: int, pos: int, token: int, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of the token after `token`, which is at `pos` behind a token with this hidden state; and the block's own hidden state."""
        batch = Batch()
        batch.add(token, pos, seq, output=True, embd=hidden)
        self.ctx.process("decode", batch)
        return self.ctx.logits[-1], self.ctx.hidden[-1].copy()


class MtpDraft:
    """Guesses what follows sequence `seq` of a Context that `nextn` follows; draws, `n_min` and `p_min` as of `ModelDraft`."""

    def __init__(self, nextn: Nextn, seq: int = 0, *, n_min: int = 0, p_min: float = 0.0):
        integers(seq=seq, n_min=n_min)
        numbers(p_min=p_min)
        expect("nextn", nextn, Nextn, "a Nextn")
        if not 0 <= seq < nextn.ctx.n_seq_max:
            raise Error(f"seq is {seq}; the context has sequences 0 to {nextn.ctx.n_seq_max - 1}")
        self.nextn, self.seq, self.n_min, self.p_min = nextn, seq, n_min, p_min

    def propose(self, tokens: Sequence[int], n: int, sampler: Sampler) -> list[int]:
        return next(iter(self.branches(tokens, n, 1, sampler)), [])

    def branches(self, tokens: Sequence[int], n: int, most: int, sampler: Sampler) -> list[list[int]]:
        """As of `ModelDraft`."""
        nextn, last = self.nextn, len(tokens) - 1
        hidden = nextn.hidden[self.seq].get(last - 1)
        n = min(n, nextn.ctx.cparams.n_ctx_seq - len(tokens))
        if hidden is None or n < max(self.n_min, 1):
            return []
        nextn.back(self.seq, last)
        state, pos = hidden, last - 1

        def row(token: int) -> np.ndarray:
            nonlocal state, pos
            pos += 1
            logits, state = nextn.logits(self.seq, pos, token, state)
            return logits
        return guesses(row, tokens[-1], n, most, sampler, nextn.ctx.model, self.n_min, self.p_min)

    def abort(self) -> None:
        self.nextn.ctx.abort()
