"""Which neighbouring steps run as one: each thread does its share of all of them, and nobody waits in between.

In: steps with what they read and write, in order. Out: their flags, and how each is cut into shares. Two steps can be
joined where neither touches what the other writes, or where both can be cut alike, so that a share reads what the same
share wrote. It knows no ops: a step that says nothing about its cuts stands alone.

A step may be cut by tokens (rows of all inner axes) or by columns (runs of 32 along axis 0, of all tokens). Two cuts
are alike if they cut equally many things; then share i of both is the same part of a tensor that both touch.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ggraph.size import terms_of
from ggraph.tensor import Tensor

from .layout import ANYHOW, COLUMNS, TOKENS, extent, packed

if TYPE_CHECKING:
    from .lower import Cuts, Field, Scratch, Step

TOGETHER = 1                                # flag of a step: the next one belongs to it


def by_tokens(n: int) -> Cuts:
    """Cut into n things, tokens or rows."""
    return {TOKENS: n}


def by_columns(n: int) -> Cuts:
    """Cut into runs of 32 of n columns."""
    return {COLUMNS: n}


class _Span(NamedTuple):
    """Bytes that a step touches: of a buffer, or all of some scratch memory."""
    field: Field
    home: Any
    start: int
    end: int

    def overlaps(self, other: _Span) -> bool:
        return self.start < other.end and other.start < self.end and bool(self.home == other.home)


class _Member(NamedTuple):
    step: Step
    spans: list[_Span]
    written: _Span


def join(steps: Sequence[Step]) -> None:
    """Set flags and cuts. Each step joins those before it if it can."""
    group: list[_Member] = []
    known: dict[Tensor, tuple[Any, int, int]] = {}
    for step in steps:
        if step.cuts is None:
            group.clear()
            continue
        spans = [_Span(f, *_place(f, known)) for f in step.fields if not isinstance(f, (int, float))]
        member = _Member(step, spans, next(s for s in spans if s.field is step.writes))
        if group and _fits(group, member):
            group[-1].step.flags |= TOGETHER
        else:
            group.clear()
        group.append(member)


def _place(field: Tensor | Scratch, known: dict[Tensor, tuple[Any, int, int]]) -> tuple[Any, int, int]:
    """Home, start and end of all bytes of a tensor's root; scratch memory for one purpose is one place."""
    if not isinstance(field, Tensor):
        return field, 0, 1
    root = field.root
    if root not in known:
        known[root] = extent(root)
    return known[root]


def _fits(group: Sequence[_Member], member: _Member) -> bool:
    clashes = [(other.step, pair) for other in group for pair in _clashes(other, member)]
    if not clashes:
        return True
    for how in member.step.cuts or ():
        if all(_alike(other, member.step, how) and _same_rows(*pair) for other, pair in clashes):
            for step in (member.step, *(other for other, _ in clashes)):
                step.how = how
            return True
    return False


def _clashes(a: _Member, b: _Member) -> Iterator[tuple[Field, Field]]:
    """Pairs of overlapping fields of which one is written."""
    for y in b.spans:
        if a.written.overlaps(y):
            yield a.written.field, y.field
    for x in a.spans:
        if x is not a.written and x.overlaps(b.written):
            yield x.field, b.written.field


def _alike(a: Step, b: Step, how: int) -> bool:
    assert a.cuts is not None and b.cuts is not None
    return a.how in (ANYHOW, how) and how in a.cuts and terms_of(a.cuts[how]) == terms_of(b.cuts[how])


def _same_rows(x: Field, y: Field) -> bool:
    """Things that are cut alike lie in the same places of both. Scratch memory is read as a whole."""
    if not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.place() == y.place()):
        return False
    return (all(map(_equal, (*x.ne, *x.nb), (*y.ne, *y.nb)))
            or (packed(x) and packed(y) and terms_of(x.nbytes) == terms_of(y.nbytes)))


def _equal(a: int, b: int) -> bool:
    """For all sizes of the batch."""
    return a == b and (type(a) is type(b) is int or terms_of(a) == terms_of(b))
