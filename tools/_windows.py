"""Measuring on a text: which tokens a model reads, which of its predictions count, and the rows of logits, block by block.

In: token ids, Contexts. Out: `Rows`, each with the logits of a few rows and the tokens that came next. However long the text and
large the vocabulary, the logits of about 64 MiB exist at a time.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

import ggraph

LOGITS_BYTES = 64 << 20
PAD = 256               # llama.cpp rounds contexts up to this


@dataclass(frozen=True)
class Window:
    """What is read from position 0, and what the predictions of rows `first`, first + 1, ... are held against.

    `tokens` end with the last row that counts: len(tokens) = first + len(targets).
    """
    tokens: Sequence[int]
    first: int
    targets: Sequence[int]


@dataclass(frozen=True)
class Rows:
    """Predictions `first`, first + 1, ... of a window: targets int32 [n], and for each Context float32 [n, n_vocab]."""
    window: int
    first: int
    targets: npt.NDArray[np.int32]
    logits: tuple[npt.NDArray[np.float32], ...]


def chunks(tokens: Sequence[int], n_ctx: int, bos: int | None, n_chunks: int = -1) -> list[Window]:
    """llama.cpp's windows: the text in pieces of n_ctx, the first token replaced by `bos`, the second half predicted.

    Error unless there are two pieces at least.
    """
    _check(tokens, n_ctx)
    first, windows = n_ctx // 2, []
    for start in range(0, _limit(len(tokens) // n_ctx, n_chunks) * n_ctx, n_ctx):
        piece = list(tokens[start:start + n_ctx])
        head = piece[:1] if bos is None else [bos]
        windows.append(Window(head + piece[1:-1], first, piece[first + 1:]))
    return windows


def strided(tokens: Sequence[int], n_ctx: int, stride: int, n_chunks: int = -1) -> list[Window]:
    """llama.cpp's windows with --ppl-stride: n_ctx + stride / 2 tokens, rounded up; the last `stride` are predicted, no BOS."""
    size = -(-(n_ctx + stride // 2) // PAD) * PAD
    _check(tokens, size)
    if stride >= size:
        raise ggraph.Error(f"a stride of {stride} needs windows longer than that; raise -c or lower --ppl-stride")
    starts = range(0, _limit(-(-(len(tokens) - size) // stride), n_chunks) * stride, stride)
    return [Window(tokens[s:s + size - 1], size - stride - 1, tokens[s + size - stride:s + size]) for s in starts]


def sliding(tokens: Sequence[int], n_ctx: int, stride: int, n_chunks: int = -1) -> list[Window]:
    """Hugging Face's windows: every token but the first is predicted once, by the first window of n_ctx tokens that reaches it."""
    if not 0 < stride < n_ctx:
        raise ggraph.Error(f"the stride is {stride}; it must be at least 1 and less than the window of {n_ctx}")
    if len(tokens) < 2:
        raise ggraph.Error("the text has fewer than two tokens")
    windows, done = [], 1
    for start in range(0, len(tokens), stride):
        end = min(start + n_ctx, len(tokens))
        windows.append(Window(tokens[start:end - 1], done - 1 - start, tokens[done:end]))
        done = end
        if end == len(tokens) or len(windows) == n_chunks:
            break
    return windows


def _check(tokens: Sequence[int], n_ctx: int) -> None:
    if n_ctx < 4:
        raise ggraph.Error(f"a window of {n_ctx} tokens is too short; 4 is the least")
    if len(tokens) < 2 * n_ctx:
        raise ggraph.Error(f"the text has {len(tokens)} tokens; windows of {n_ctx} need {2 * n_ctx} at least: "
                           "give a longer text or a smaller -c")


def _limit(most: int, n_chunks: int) -> int:
    return most if n_chunks < 1 else min(most, n_chunks)


def longest(windows: Sequence[Window]) -> int:
    return max((len(w.tokens) for w in windows), default=0)


def evaluate(contexts: Sequence[ggraph.Context], windows: Sequence[Window]) -> Iterator[Rows]:
    """Run the windows, as many of one shape together as there are sequences; the Contexts take the same batches in turn.

    The arrays of `Rows` hold until the next ones are asked for.
    """
    n_seqs = min(c.n_seq_max for c in contexts)
    done = 0
    for _, alike in groupby(windows, lambda w: (len(w.tokens), w.first)):
        same = list(alike)
        for i in range(0, len(same), n_seqs):
            yield from _together(contexts, same[i:i + n_seqs], done + i)
        done += len(same)


def _together(contexts: Sequence[ggraph.Context], group: Sequence[Window], number: int) -> Iterator[Rows]:
    """Windows of one shape, side by side: the rows without output, then those with, a few at a time."""
    for ctx in contexts:
        ctx.memory.clear()
    n, first = len(group[0].tokens), group[0].first
    n_batch = min(c.cparams.n_batch for c in contexts)
    n_rows = min(n_batch, rows_at_once(*contexts)) // len(group)
    for start, stop in [*_spans(0, first, n_batch // len(group)), *_spans(first, n, n_rows)]:
        batch = ggraph.Batch()
        for seq, window in enumerate(group):
            for pos in range(start, stop):
                batch.add(window.tokens[pos], pos, seq, output=pos >= first)
        for ctx in contexts:
            ctx.process("decode", batch)
        for seq, window in enumerate(group if start >= first else ()):
            part = slice(seq * (stop - start), (seq + 1) * (stop - start))
            targets = np.array(window.targets[start - first:stop - first], np.int32)
            yield Rows(number + seq, start - first, targets, tuple(ctx.logits[part] for ctx in contexts))


def rows_at_once(*contexts: ggraph.Context) -> int:
    """Rows of logits that may exist at a time in each of the Contexts."""
    return max(1, LOGITS_BYTES // (4 * sum(c.model.n_vocab for c in contexts)))


def _spans(start: int, stop: int, step: int) -> list[tuple[int, int]]:
    step = max(1, step)
    return [(i, min(i + step, stop)) for i in range(start, stop, step)]
