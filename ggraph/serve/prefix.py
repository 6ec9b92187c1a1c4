"""In: two token lists. Out: how much of their start is the same."""
from __future__ import annotations

from collections.abc import Sequence


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common start of two lists."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:       # equal up to low, not up to high
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
