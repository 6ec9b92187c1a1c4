"""Looking at nodes while they are computed, and changing them: what a Context is given as `on_node`."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import function
from .tensor import Tensor

STOP = object()                     # returned by a hook: stop this step as if it had not been


@dataclass(frozen=True)
class Hook:
    """Look at nodes while they are computed: `fn(name, array, node)` for every node that `match` accepts.

    `match` is a name pattern ("l_out-*") or a predicate of the node. `array` is F32 or I32 in NumPy order (the reverse of
    `node.ne`). `fn` returns None, an array that takes its place, or STOP. Matched nodes are part of the graph key: such a
    plan is cut after them and not fused across them.
    """
    match: str | Callable[[Tensor], bool]
    fn: Callable[[str, np.ndarray, Tensor], Any]

    def __post_init__(self) -> None:
        if not isinstance(self.match, str):
            function("match, where it is no name pattern,", self.match)
        function("fn", self.fn)

    def accepts(self, node: Tensor) -> bool:
        if not isinstance(self.match, str):
            return self.match(node)
        from fnmatch import fnmatchcase
        return fnmatchcase(node.name, self.match)
