"""Small graphs on the reference backend: leaves from arrays, the result as an array, and how close it must be."""
from __future__ import annotations

from typing import Any

import numpy as np

from ggraph import quants
from ggraph.backend import HostBuffer
from ggraph.backends.ref import Ref
from ggraph.dtypes import F32, I32, DType
from ggraph.tensor import Tensor, leaf
from tests.backends.opcase import nmse, nodes_of

Array = Any
REF = Ref()
RNG = np.random.default_rng(7)
INF = float("inf")


def tensor(x: Array, type: DType = F32) -> Tensor:
    """A leaf that holds x, of NumPy shape; integers become I32."""
    x = np.asarray(x)
    type = I32 if x.dtype.kind == "i" else type
    raw = x.astype(np.int32).view(np.uint8) if type is I32 else quants.pack(x.astype(np.float32), type)
    node = leaf(type, x.shape[::-1], "leaf")
    node.buffer = HostBuffer(np.array(raw).reshape(-1))
    return node


def tensors(*arrays: Array) -> Any:
    return [tensor(x) for x in arrays]


def evaluate(node: Tensor) -> Array:
    """The result without leading axes of 1."""
    nodes = nodes_of(node)
    for n in nodes:
        if n.view_src is None:
            n.buffer = REF.alloc(int(n.nbytes))
    plan = REF.compile(nodes)
    plan.run()
    x = np.array(plan.read(node))
    while x.ndim > 1 and len(x) == 1:
        x = x[0]
    return x


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def close(x: Array, expected: Array, tolerance: float = 1e-11) -> None:
    assert nmse(x, expected) < tolerance


def value(x: Array, type: DType) -> Array:
    """x as it is after rounding to `type`."""
    return quants.unpack(quants.pack(np.asarray(x, np.float32), type), type).astype(np.float64)
