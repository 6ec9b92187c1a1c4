"""The tokens of one sequence of a Context, in agreement with its memory whatever fails.

In: the token list that the sequence shall hold next. Out: rows for a batch; memory that kept the longest common start.
Must not know: text, samplers.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

from .. import env
from ..batch import Batch
from ..context import Context
from ..drawing import Drawing

Report = Callable[[int, int], None]         # (tokens done, tokens in all)
UNKNOWN = -1                                # a token that only the device knows as yet


class History:
    """`tokens[i]` is at position i of sequence `seq`. `turn` counts the texts begun, so that a stale user can be told.

    Between two calls tokens and memory may disagree only because the caller was stopped half-way (Ctrl-C): then both
    have a true common start, which is where the next call goes on from.
    """

    def __init__(self, ctx: Context, seq: int = 0):
        self.ctx, self.seq = ctx, seq
        self.tokens: list[int] = []
        self.turn = 0
        self.adapters = ctx.adapters           # with which the tokens were evaluated

    @property
    def n_ctx(self) -> int:
        """Tokens that this sequence can hold."""
        return self.ctx.cparams.n_ctx_seq

    def reuse(self, tokens: Sequence[int]) -> int:
        """Begin a text: keep its longest start that is here and take out the rest; how many tokens were kept.

        At least its last token is left to be evaluated, for its logits. What other adapters made is not kept.
        """
        self.turn += 1
        self.settle()
        if self.adapters != self.ctx.adapters:
            self.adapters = self.ctx.adapters
            self.cut(0)
        same = next((i for i, (a, b) in enumerate(zip(self.tokens, tokens[:-1])) if a != b), None)
        return self.cut(min(len(self.tokens), len(tokens) - 1) if same is None else same)

    def clear(self) -> None:
        """Begin a text with nothing kept."""
        self.turn += 1
        self.adapters = self.ctx.adapters
        self.cut(0)

    def encode(self, text: Sequence[int]) -> None:
        """Begin the answer of a model with an encoder, which takes the whole text at once."""
        self.clear()
        batch = Batch()
        for token in text:
            batch.add(token, None, self.seq)
        self.ctx.process("encode", batch)

    def settle(self) -> None:
        """Bring tokens and memory into agreement after a step that did not come to its end, wherever it was stopped."""
        memory = self.ctx.memory
        memory.rollback()
        last = min((store.seq_pos_max(self.seq) for store in memory.stores), default=-1)
        self.cut(min(len(self.tokens), last + 1))

    def cut(self, n: int) -> int:
        """Keep n tokens, or none where the memory cannot go back that far (a window, a state); how many were kept."""
        memory = self.ctx.memory
        if memory.seq_pos_max(self.seq) >= n and not memory.seq_rm(self.seq, n, -1):
            memory.seq_rm(self.seq, -1, -1)
            n = 0
        del self.tokens[n:]
        return n

    def branch(self, seqs: Sequence[int]) -> None:
        """Let other sequences share what this one holds, in place of what they hold."""
        for seq in seqs:
            self.ctx.memory.seq_rm(seq, -1, -1)
            self.ctx.memory.seq_cp(self.seq, seq)

    def adopt(self, seq: int, tokens: Sequence[int]) -> None:
        """Hold these tokens, which this sequence or one that branched off it holds, maybe with more behind them; none, where the
        memory cannot go back that far."""
        if seq != self.seq:
            self.ctx.memory.seq_rm(self.seq, -1, -1)
            self.ctx.memory.seq_cp(seq, self.seq)
        self.tokens[:] = tokens
        self.cut(len(tokens))

    def queue(self, batch: Batch, tokens: Sequence[int], outputs: int = 1) -> None:
        """Rows for the next tokens, the last `outputs` of them with output. If the batch then fails: `settle`."""
        first = len(tokens) - outputs
        for i, token in enumerate(tokens):
            batch.add(token, len(self.tokens), self.seq, output=i >= first)
            self.tokens.append(token)

    def add(self, tokens: Sequence[int], report: Report | None = None, drawing: Drawing | None = None) -> None:
        """Evaluate the next tokens, an ubatch at a time; afterwards the Context has the last one's logits, or draws from them."""
        step = self.ctx.cparams.n_ubatch
        for start in range(0, len(tokens), step):
            part = tokens[start:start + step]
            last = start + len(part) == len(tokens)
            self.process(part, outputs=int(last), drawing=drawing if last else None)
            if report:
                report(start + len(part), len(tokens))

    def process(self, tokens: Sequence[int], outputs: int, drawing: Drawing | None = None) -> None:
        """Evaluate at most n_batch tokens; logits for the last `outputs`, or a token that is drawn from them."""
        batch = Batch()
        try:
            self.queue(batch, tokens, outputs)
            if drawing is None:
                self.ctx.process("decode", batch)
            else:
                self.ctx.draw(batch, drawing)
        except BaseException:
            self.settle()
            raise

    def follow(self, drawing: Drawing) -> None:
        """Evaluate the token that was drawn last, and draw the next; here it is UNKNOWN until the caller has read it."""
        drawing.chained = True
        self.process([0], 1, drawing)
        self.tokens[-1] = UNKNOWN

    def process_tree(self, rows: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Evaluate tokens of this sequence and of others that branched off it, with logits for all. Each: the token, how far it is
        behind the end of the text, the sequences that hold it."""
        batch, n = Batch(), len(self.tokens)
        try:
            for token, ahead, seqs in rows:
                batch.add(token, n + ahead, seqs, output=True)
                if self.seq in seqs:
                    self.tokens.append(token)
            self.ctx.process("decode", batch)
        except BaseException:
            self.settle()
            raise

    def shift(self, n_keep: int, n_discard: int = 0) -> None:
        """Make room as llama.cpp does: behind the first `n_keep` tokens, `n_discard` of the others are dropped, 0: half of them.

        Where positions cannot be moved in the cache, the tokens that stay are evaluated again.
        """
        n_past = len(self.tokens)
        n_keep = min(n_keep, self.n_ctx - 4)
        n_left = max(0, n_past - n_keep)
        dropped = min(n_discard, max(n_left - 1, 0)) or n_left // 2
        kept = self.tokens[:n_keep] + self.tokens[n_keep + dropped:]
        self.tokens = []            # until memory has followed, they have nothing in common
        memory = self.ctx.memory
        if (self.ctx.model.hparams.rope_mode is not None and memory.seq_rm(self.seq, n_keep, n_keep + dropped)
                and memory.seq_add(self.seq, n_keep + dropped, n_past, -dropped)):
            self.tokens = kept
            return
        env.log(f"the cache of this model cannot be shifted: {len(kept)} tokens are evaluated again")
        self.settle()
        self.add(kept)
