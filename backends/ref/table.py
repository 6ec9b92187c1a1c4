"""The table of kernels: op name -> what computes it.

A kernel is a function called like its op. `kernel` takes the node and its sources as arrays (NumPy order: the reverse
of `ne`; absent sources are None) and returns the result, which the plan stores with the node's strides and type.
`placed` is for the few ops that must not read a whole source, or that write in place: it takes operands instead of
arrays and returns a result, or None when it has written in place.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from .arrays import Array, Operand

KERNELS: dict[str, Callable[..., Array | None]] = {}
F = TypeVar("F", bound=Callable[..., Any])


def placed(function: F, name: str = "") -> F:
    """Enter a kernel that takes its sources as operands."""
    name = name or function.__name__
    assert name not in KERNELS, name
    KERNELS[name] = function
    return function


def kernel(function: F, name: str = "") -> F:
    """Enter a kernel that takes its sources as arrays, float32 where the source is of any float or quantized type."""
    def run(out: Operand, *sources: Operand | None) -> Array:
        result: Array = function(out, *(None if s is None else s.read() for s in sources))
        return result
    placed(run, name or function.__name__)
    return function


def elementwise(name: str, function: Callable[..., Array]) -> None:
    """Enter a function of arrays alone."""
    kernel(lambda out, *sources: function(*sources), name)


f32 = np.float32
