"""Parts of a text that come again in the next prompt, behind tokens that do not: they are moved to their new positions.

In: the tokens of a sequence, and those it shall hold. Out: the moves, and memory that has followed them. As in llama.cpp the
moved tokens keep what they took from those that are gone: answers may differ from those of a prompt evaluated whole.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..context import Context
from ..generate import History
from ..ops import MROPE
from .prefix import common


class Chunk(NamedTuple):
    """`n` tokens at position `at` come to position `to`."""
    at: int
    to: int
    n: int


def refusal(ctx: Context) -> str:
    """Why no memory of this context can move tokens; "" where it can."""
    mode = ctx.model.hparams.rope_mode
    if ctx.memory.rs is not None:
        return "its recurrent layers cannot forget what came between"
    if mode is None or mode & MROPE or not ctx.memory.can_shift:
        return "its positions cannot be moved in the cache"
    return ""


def plan(have: Sequence[int], want: Sequence[int], start: int, least: int) -> list[Chunk]:
    """Both are the same up to `start`. Behind it `have` is gone through once; of it what `want` goes on with, at least `least`
    tokens, is kept, as llama.cpp does."""
    chunks, at, to = list[Chunk](), start, start
    while at <= len(have) - least and to <= len(want) - least:
        if have[at] != want[to] or have[at:at + least] != want[to:to + least]:
            at += 1
            continue
        n = common(have[at:], want[to:])
        chunks.append(Chunk(at, to, n))
        at, to = at + n, to + n
    return chunks


def move(history: History, chunks: Sequence[Chunk]) -> int:
    """Carry the moves out, as many as memory can; how many tokens were moved. The sequence ends behind the last one."""
    tokens, memory, moved = history.tokens, history.ctx.memory, 0
    history.tokens = tokens[:chunks[0].to]          # until memory has followed, nothing else is certain
    kept = list(history.tokens)
    for at, to, n in chunks:
        if not (memory.seq_rm(history.seq, to, at) and memory.seq_add(history.seq, at, at + n, to - at)):
            break
        kept += tokens[at:at + n]
        moved += n
    if memory.seq_rm(history.seq, len(kept), -1):
        history.tokens = kept
        return moved
    history.cut(0)
    return 0
