"""Which neighbouring steps run as one: each thread does its share of all of them, and nobody waits in between.

In: steps with what they read and write, in order. Out: their flags, and how each is cut into shares. Two steps can be
joined where neither touches what the other writes, or where both can be cut alike, so that a share reads what the same
share wrote. It knows no ops: a step that says nothing about its cuts stands alone.

A step may be cut by tokens (rows of all inner axes) or by columns (runs of 32 along axis 0, of all tokens). Two cuts
are alike if they cut equally many things; then share i of both is the same part of a tensor that both touch.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ggraph.size import terms_of
from ggraph.tensor import Tensor

from .layout import ANYHOW, COLUMNS, TOKENS, packed

if TYPE_CHECKING:
    from .lower import Cuts, Field, Step

TOGETHER = 1                                # flag of a step: the next one belongs to it


def by_tokens(n: int) -> Cuts:
    """Cut into n things, tokens or rows."""
    return {TOKENS: n}


def by_columns(n: int) -> Cuts:
    """Cut into runs of 32 of n columns."""
    return {COLUMNS: n}


def join(steps: Sequence[Step]) -> None:
    """Set flags and cuts. Each step joins those before it if it can."""
    group: list[Step] = []
    for step in steps:
        if group and _fits(group, step):
            group[-1].flags |= TOGETHER
        else:
            group.clear()
        group.append(step)


def _fits(group: Sequence[Step], step: Step) -> bool:
    if step.cuts is None or group[-1].cuts is None:
        return False
    tied = [other for other in group if any(True for _ in _clashes(other, step))]
    if not tied:
        return True
    for how in step.cuts:
        if all(_alike(other, step, how) for other in tied):
            for other in (*tied, step):
                other.how = how
            return True
    return False


def _alike(a: Step, b: Step, how: int) -> bool:
    assert a.cuts is not None and b.cuts is not None
    return (a.how in (ANYHOW, how) and how in a.cuts and terms_of(a.cuts[how]) == terms_of(b.cuts[how])
            and all(_same_rows(x, y) for x, y in _clashes(a, b)))


def _clashes(a: Step, b: Step) -> Iterator[tuple[Field, Field]]:
    """Pairs of overlapping fields of which one is written."""
    for x in _places(a):
        for y in _places(b):
            if (x is a.writes or y is b.writes) and _overlap(x, y):
                yield x, y


def _places(step: Step) -> list[Field]:
    return [f for f in step.fields if not isinstance(f, (int, float))]


def _overlap(x: Field, y: Field) -> bool:
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return x == y                                       # scratch memory for one purpose is one place
    a, b = x.root, y.root
    return a.buffer is b.buffer and bool(a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes)


def _same_rows(x: Field, y: Field) -> bool:
    """Things that are cut alike lie in the same places of both. Scratch memory is read as a whole."""
    return (isinstance(x, Tensor) and isinstance(y, Tensor) and x.place() == y.place() and packed(x) and packed(y)
            and terms_of(x.nbytes) == terms_of(y.nbytes))

