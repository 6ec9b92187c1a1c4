"""The table itself: how an op enters it, and what constructors check with."""
from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ggraph.tensor import Tensor

OPS: dict[str, Callable[..., Tensor]] = {}
VIEWS = frozenset({"none", "view", "reshape", "permute", "transpose"})     # nothing to compute
C = TypeVar("C", bound=Callable[..., Tensor])


def op(make: C) -> C:
    """Enter a constructor in the table under its own name."""
    assert make.__name__ not in OPS, make.__name__
    OPS[make.__name__] = make
    return make


def check(condition: bool, what: str, *tensors: Tensor) -> None:
    if not condition:
        raise ValueError(what + ": " + "; ".join(map(repr, tensors)))


def repeats(a: Tensor, b: Tensor) -> bool:
    """`b` can be broadcast over `a`."""
    return all(x == y or y == 1 or x % y == 0 for x, y in zip(a.ne, b.ne))
