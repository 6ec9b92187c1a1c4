"""Numbers on which the errors of quantizing were measured: shapes that weights have, and harder ones."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ggraph import dtypes, quants
from ggraph.dtypes import DType

EXACT = (dtypes.Q4_0, dtypes.Q4_1, dtypes.Q5_0, dtypes.Q5_1, dtypes.Q8_0, dtypes.TQ1_0, dtypes.TQ2_0, dtypes.MXFP4)


def rows() -> Iterator[tuple[str, Any]]:
    """name, float32 [8, 1024]. From NumPy's frozen generator, so they are the same everywhere."""
    rng = np.random.RandomState(11)
    shape = (8, 1024)
    normal = rng.standard_normal(shape)
    yield "normal", (normal * 0.02).astype(np.float32)
    yield "rows of all sizes", (normal * 10.0 ** rng.uniform(-4, 1, (8, 1))).astype(np.float32)
    yield "uniform", rng.uniform(-0.05, 0.05, shape).astype(np.float32)
    yield "one-sided", np.abs(normal * 0.02).astype(np.float32)
    tails = normal / np.abs(rng.standard_normal(shape) + 1e-3) ** 0.5
    yield "heavy tails", (tails * 0.02).astype(np.float32)
    yield "one large value", np.where(rng.uniform(size=shape) < 1 / 256, 1.0, normal * 0.02).astype(np.float32)


def importance(n: int) -> Any:
    """float32 [n], as uneven as activations are."""
    rng = np.random.RandomState(12)
    return (rng.standard_normal(n) ** 2 + rng.standard_normal(n) ** 2 + 0.01).astype(np.float32)


def error(x: Any, packed: Any, dtype: DType, w: Any = None) -> float:
    """The root of the (weighted) mean square."""
    miss = (x - quants.unpack(packed, dtype)).astype(np.float64)
    return float(np.sqrt(np.mean(miss * miss * (1 if w is None else w))))
