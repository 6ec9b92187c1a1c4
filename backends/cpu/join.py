"""Which neighbouring steps run as one: each thread does its share of all of them, and nobody waits in between.

In: steps with what they read and write, in order. Out: their flags, and how each is cut into shares. Two steps can be
joined where neither touches what the other writes, or where both can be cut alike, so that a share reads what the same
share wrote. It knows no ops: a step that says nothing about its cuts stands alone.

A step may be cut by tokens (rows of all inner axes) or by columns (runs of 32 along axis 0, of all tokens). Two cuts
are alike if they cut equally many things; then share i of both is the same part of a tensor that both touch.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ggraph.size import terms_of
from ggraph.tensor import Tensor

from ..lowering import extent, packed
from .layout import ANYHOW, COLUMNS, TOKENS

if TYPE_CHECKING:
    from .lower import Cuts, Field, Step

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


class _Member(NamedTuple):
    step: Step
    spans: list[_Span]
    written: _Span


def join(steps: Sequence[Step]) -> None:
    """Set flags and cuts. Each step joins those before it if it can."""
    group: list[_Member] = []
    known: dict[Field, tuple[Any, int, int]] = {}
    for step in steps:
        if step.cuts is None:
            group.clear()
            continue
        member = _member(step, known)
        if group and _fits(group, member):
            group[-1].step.flags |= TOGETHER
        else:
            group.clear()
        group.append(member)


def _member(step: Step, known: dict[Field, tuple[Any, int, int]]) -> _Member:
    spans = []
    for field in step.fields:
        if type(field) is Tensor:
            root: Field = field.root
            place = known.get(root) or known.setdefault(root, extent(field.root))
        elif isinstance(field, (int, float)):
            continue
        else:                                       # scratch memory for one purpose is one place
            place = field, 0, 1
        span = _Span(field, *place)
        spans.append(span)
        if field is step.writes:
            written = span
    return _Member(step, spans, written)


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


def _clashes(a: _Member, b: _Member) -> list[tuple[Field, Field]]:
    """Pairs of overlapping fields of which one is written."""
    field, home, start, end = a.written
    found = [(field, y[0]) for y in b.spans if start < y[3] and y[2] < end and y[1] is home]
    field, home, start, end = b.written
    return found + [(x[0], field) for x in a.spans if start < x[3] and x[2] < end and x[1] is home and x is not a.written]


def _alike(a: Step, b: Step, how: int) -> bool:
    assert a.cuts is not None and b.cuts is not None
    return a.how in (ANYHOW, how) and how in a.cuts and terms_of(a.cuts[how]) == terms_of(b.cuts[how])


def _same_rows(x: Field, y: Field) -> bool:
    """Things that are cut alike lie in the same places of both. Scratch memory is read as a whole."""
    if not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.place() == y.place()):
        return False
    return x is y or (all(map(_equal, (*x.ne, *x.nb), (*y.ne, *y.nb)))
            or (packed(x) and packed(y) and terms_of(x.nbytes) == terms_of(y.nbytes)))


def _equal(a: int, b: int) -> bool:
    """For all sizes of the batch."""
    return a == b and (type(a) is type(b) is int or terms_of(a) == terms_of(b))
