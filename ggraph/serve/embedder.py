"""Embeddings for many callers from one Context, one text after the other, on a thread of its own.

In: token ids from any thread. Out: futures of vectors. Must not know: HTTP, JSON, text.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from ..batch import Batch
from ..context import Context
from ..errors import Aborted, ContextFull, Error, Single, expect, integer


class Embedder(Single):
    """`ctx` must have been opened with `embeddings=True`; it is used by this object alone, and stays the caller's to close."""

    def __init__(self, ctx: Context):
        expect("ctx", ctx, Context, "a Context")
        self.ctx = ctx
        self._thread = ThreadPoolExecutor(1, "ggraph-embedder")
        self._closing = False

    @property
    def n_max(self) -> int:
        """Tokens of a text, at most: it must be one ubatch."""
        return min(self.ctx.cparams.n_ubatch, self.ctx.cparams.n_ctx_seq)

    def submit(self, ids: Sequence[int]) -> Future[npt.NDArray[np.float32]]:
        """float32 [n_embd], or [n_tokens, n_embd] without pooling. Errors, at once: `Error` for no tokens, `ContextFull` for
        too many."""
        expect("ids", ids, Iterable, "token ids")
        ids = [integer("a token of ids", i) for i in ids]
        if not ids:
            raise Error("the text has no tokens; give at least one")
        if len(ids) > self.n_max:
            raise ContextFull(f"input ({len(ids)} tokens) is too large to process: {self.n_max} are possible; "
                              "increase the physical batch size (-ub)")
        if self._closing:
            raise Aborted("the server is stopping")
        return self._thread.submit(self._embed, ids)

    def _embed(self, ids: list[int]) -> npt.NDArray[np.float32]:
        if self._closing:
            raise Aborted("the server is stopping")
        ctx = self.ctx
        ctx.memory.clear()
        batch = Batch()
        for pos, token in enumerate(ids):
            batch.add(token, pos, 0, output=True)
        ctx.process("decode" if ctx.cparams.causal else "encode", batch)
        rows: npt.NDArray[np.float32] = ctx.embeddings.copy()
        if not np.isfinite(rows).all():
            raise Error("the model computed NaN or inf for this text: look at the model file")
        return rows if ctx.cparams.pooling == "none" else rows[0]

    def close(self) -> None:
        """Stop at once; texts that are not done get `Aborted`."""
        self._closing = True
        self.ctx.abort()
        self._thread.shutdown()
