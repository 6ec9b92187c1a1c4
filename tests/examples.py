"""How many examples the property tests of memory and recurrent layers try: what they ask for, times GGRAPH_TEST_EXAMPLES (1)."""
from __future__ import annotations

import os


def examples(n: int) -> int:
    return n * int(os.environ.get("GGRAPH_TEST_EXAMPLES", "1"))
