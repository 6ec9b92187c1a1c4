"""Sizes of a batch as integers that remember how they were computed, so that a built plan can be resized.

In: named variables (`n_tokens`, `n_kv`, ...) with the value they have while a graph is built. Out: `Size`, an `int`
in every respect, that carries the polynomial in those variables. A graph is built once at the largest sizes; every
size, stride and offset in it is then re-evaluated for the batch at hand in one vectorised pass (`Sizes`).
An operation that would lose the polynomial raises instead of quietly baking a number into the plan.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

Monomial = tuple[str, ...]          # sorted variable names; () is the constant term
Terms = dict[Monomial, int]


class Size(int):
    """An integer with its polynomial. Plain integers are constants."""
    terms: Terms
    multiples: dict[int, Size]          # made so far: a graph asks for the same few again and again

    def __new__(cls, value: int, terms: Terms) -> Size:
        self = super().__new__(cls, value)
        self.terms, self.multiples = terms, {}
        return self

    @classmethod
    def variable(cls, name: str, value: int) -> Size:
        return cls(value, {(name,): 1})

    def __add__(self, other: int) -> Any:
        return _make(int(self) + int(other), _sum(self.terms, terms_of(other)))

    def __sub__(self, other: int) -> Any:
        return self + (-1) * other

    def __rsub__(self, other: int) -> Any:
        return other + (-1) * self

    def __mul__(self, other: int) -> Any:
        if type(other) is int and other:                    # nearly always: strides
            if other == 1:
                return self
            multiple = self.multiples.get(other)
            if multiple is None:
                multiple = Size(int.__mul__(self, other), {m: c * other for m, c in self.terms.items()})
                self.multiples[other] = multiple
            return multiple
        if not isinstance(other, int):
            return NotImplemented
        return _make(int(self) * int(other), _product(self.terms, terms_of(other)))

    def __floordiv__(self, other: int) -> Any:
        if other == 1:
            return self
        return _make(int(self) // int(other), _quotient(self.terms, terms_of(other)))

    __radd__, __rmul__ = __add__, __mul__

    def __rfloordiv__(self, other: int) -> Any:
        return _make(int(other) // int(self), _quotient(terms_of(other), self.terms))

    def __neg__(self) -> Any:
        return (-1) * self

    def __mod__(self, other: int) -> int:
        """Zero where the division is exact for all values; anything else depends on the batch and is refused."""
        _quotient(self.terms, terms_of(other))
        return 0

    def _refuse(self, *other: object) -> NoReturn:
        raise TypeError(f"{self!r} would no longer depend on the size of the batch; if that is meant, use int()")

    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __rmod__ = __divmod__ = __rdivmod__ = _refuse
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __invert__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _refuse

    @property
    def formula(self) -> str:
        """The polynomial as it is written: "2*n_tokens+1"."""
        return "+".join("*".join([str(c)] * (c != 1 or not m) + list(m)) for m, c in self.terms.items()) or "0"

    def __repr__(self) -> str:
        return f"{int(self)}={self.formula}"

    __str__ = int.__repr__


def terms_of(x: int) -> Terms:
    """The polynomial of any integer."""
    return x.terms if isinstance(x, Size) else {(): int(x)} if x else {}


def _make(value: int, terms: Terms) -> int:
    if all(m == () for m in terms):
        return value
    return Size(value, terms)


def _sum(a: Terms, b: Terms) -> Terms:
    out = dict(a)
    for m, c in b.items():
        out[m] = out.get(m, 0) + c
        if not out[m]:
            del out[m]
    return out


def _product(a: Terms, b: Terms) -> Terms:
    out: Terms = {}
    for m, c in a.items():
        for n, d in b.items():
            out = _sum(out, {tuple(sorted(m + n)): c * d})
    return out


def _quotient(a: Terms, b: Terms) -> Terms:
    """Exact division by a single term."""
    if len(b) != 1:
        raise TypeError(f"a size cannot be divided by the sum {b}")
    (n, d), = b.items()
    out: Terms = {}
    for m, c in a.items():
        rest = list(m)
        for name in n:
            if name not in rest:
                raise TypeError(f"{m} is not divisible by {n}")
            rest.remove(name)
        if c % d:
            raise TypeError(f"{c} is not divisible by {d}")
        out[tuple(rest)] = c // d
    return out


class Sizes:
    """Many integers of one plan, evaluated together: `numbers` int64 [n], as they were built until `set` gives other values.

    They may be plain integers or `Size`s. What a change of values costs depends on what changed: in a decode step that is
    next to nothing.
    """

    def __init__(self, numbers: Sequence[int]):
        self.numbers = np.fromiter(numbers, np.int64, len(numbers))
        self.constants = self.numbers.copy()
        places: dict[int, list[int]] = {}               # of each Size, by identity: a graph has few, in many places
        for i, x in enumerate(numbers):
            if type(x) is Size:
                places.setdefault(id(x), []).append(i)
        columns: dict[Monomial, list[tuple[list[int], int]]] = {}
        for at in places.values():
            terms = terms_of(numbers[at[0]])
            self.constants[at] = terms.get((), 0)
            for m, c in terms.items():
                if m:
                    columns.setdefault(m, []).append((at, c))
        self.columns = [(m, np.array([i for at, _ in rows for i in at]), np.array([c for at, c in rows for _ in at], np.int64))
                        for m, rows in columns.items()]
        self.products: list[int] = []                  # of the values last set

    def set(self, values: Mapping[str, int]) -> np.ndarray:
        """Take over the present value of every variable; `numbers`, which is always the same array."""
        self.update(values)
        return self.numbers

    def update(self, values: Mapping[str, int]) -> bool:
        """Take over the present value of every variable; whether that changed a number."""
        products, self.products = self.products, []     # none while numbers change: whom Ctrl-C stops here begins anew
        changed = not products
        if changed:
            self.numbers[:], products = self.constants, [0] * len(self.columns)
        for i, (monomial, rows, coefficients) in enumerate(self.columns):
            product = 1
            for name in monomial:
                product *= values[name]
            if product != products[i]:
                self.numbers[rows] += coefficients * (product - products[i])
                products[i], changed = product, True
        self.products = products
        return changed

    def repeat(self, start: int, stop: int, more: np.ndarray) -> None:
        """Put copies of numbers [start, stop) behind them: copy i has more[i] added, int64 [n, stop - start]."""
        n, length = more.shape
        self.numbers, self.constants = (
            np.concatenate([x[:stop], (x[start:stop] + more).ravel(), x[stop:]]) for x in (self.numbers, self.constants))
        shifts = length * np.arange(1, n + 1)[:, None]
        for i, (monomial, rows, coefficients) in enumerate(self.columns):
            inside = (rows >= start) & (rows < stop)
            rows = np.concatenate([np.where(rows < stop, rows, rows + n * length), (rows[inside] + shifts).ravel()])
            self.columns[i] = monomial, rows, np.concatenate([coefficients, np.tile(coefficients[inside], n)])
