"""The op table: one row per op, which is its constructor with its shape and type rule.

In: tensors and parameters. Out: a `Tensor` whose shape is checked here, so that a wrong graph fails where it is
written. Names and meaning are ggml's. What an op computes is defined by `backends/ref`; where it runs is decided by the
scheduler. Shapes in comments are in ggml order, contiguous axis first.
"""
from .table import *            # noqa: F403, I001     this order is the reading order, and that of docs/ops.md
from .move import *             # noqa: F403
from .matmul import *           # noqa: F403
from .elementwise import *      # noqa: F403
from .rows import *             # noqa: F403
from .attention import *        # noqa: F403
from .recurrent import *        # noqa: F403
from .sample import *           # noqa: F403
