"""In: an array of logits or scores. Out: positions in the order in which llama.cpp sorts them. Knows no tokens.

llama.cpp takes the k largest with `std::partial_sort` up to k = 128. Above that it throws the logits into 128 buckets
over -10..10, sorts each full bucket with `std::sort` and the last one with `std::partial_sort`. Neither is stable:
equal values come out as the heap and the partitions of libstdc++ leave them. So the fast path here sorts with NumPy,
lower position first, and only where equal finite values are found among the chosen ones is libstdc++ retraced, step by
step. Equal values of -inf are left alone: their probability is zero in any order. More than `_RETRACED` values are not
retraced (it would take seconds in Python); then the lower position comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
Ints = NDArray[np.intp]
Item = tuple[float, int]  # (sort key, position); all routines below sort by ascending key

_RETRACED = 4096
_HEAP_MAX = 128
_BUCKETS = 128
_INSERTION = 16  # libstdc++ leaves ranges this short to the final insertion sort


def largest(x: F32, k: int) -> Ints:
    """Positions of the k largest of x [n], 1 <= k <= n, in descending order. x holds no NaN."""
    near = _survivors(x, k)
    order = near[_descending(x[near])][: k + 1]  # one more than asked for: a tie across the edge counts too
    v = x[order]
    if not ((v[1:] == v[:-1]) & (v[1:] != -np.inf)).any():
        return order[:k]
    exact = _heap_order(x, k) if k <= _HEAP_MAX else _bucket_order(x, k)
    return order[:k] if exact is None else exact


def ascending(x: F32) -> Ints:
    """Positions that sort x [n] as `std::sort` does; a NaN compares as equal to everything."""
    order = _descending(-x)
    v = x[order]
    if len(x) > _RETRACED or not ((v[1:] == v[:-1]).any() or np.isnan(v).any()):
        return order
    items = list(zip(x.tolist(), range(len(x)), strict=True))
    _std_sort(items)
    return _positions(items)


def _survivors(x: F32, k: int) -> Ints:
    """Positions, ascending, of all values that may be among the k largest: a few more than k, found without a sort."""
    n_blocks = max(2048, 8 * k)
    rows = len(x) // n_blocks
    if rows < 2:
        return np.arange(len(x))
    # A block is a column: maxima of long rows vectorize well. k blocks reach the k-th largest maximum, so k values do.
    maxima = x[: rows * n_blocks].reshape(rows, n_blocks).max(axis=0)
    return np.flatnonzero(x >= np.partition(maxima, -k)[-k])


def _descending(x: F32) -> Ints:
    """Positions that sort x in descending order, equal values by position."""
    if len(x) <= 1024:
        order: Ints = np.argsort(-x, kind="stable")
        return order
    bits = (x + np.float32(0)).view(np.int32)  # + 0 makes -0.0 and 0.0 one key
    rank = ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))  # integer order = descending order of the floats
    keys = (rank.astype(np.int64) << 32) | np.arange(len(x))  # one integer sort is 6 times faster than a stable argsort
    keys.sort()
    positions: Ints = (keys & 0xFFFFFFFF).astype(np.intp)
    return positions


def _positions(items: Iterable[Item]) -> Ints:
    return np.array([i for _, i in items], np.intp)


# --- libstdc++, retraced -------------------------------------------------------------------------


def _heap_order(x: F32, k: int) -> Ints:
    """`std::partial_sort` over all of x."""
    heap = list(zip((-x[:k]).tolist(), range(k), strict=True))
    _partial_sort(heap, _passing(-x, k, heap))
    return _positions(heap)


def _passing(keys: F32, start: int, heap: list[Item]) -> Iterator[Item]:
    """The items from `start` on that may enter the heap; all others are skipped a chunk at a time."""
    for first in range(start, len(keys), 4096):
        chunk = keys[first : first + 4096]
        for j in np.flatnonzero(chunk < heap[0][0]).tolist():
            yield float(chunk[j]), first + j


def _bucket_order(x: F32, k: int) -> Ints | None:
    """llama.cpp's bucket sort; None where more than `_RETRACED` values would have to be sorted."""
    bucket = np.clip(x * np.float32(6.4) + np.float32(64), 0, _BUCKETS - 1).astype(np.int32)
    reached = np.bincount(bucket, minlength=_BUCKETS)[::-1].cumsum()
    last = _BUCKETS - 1 - int(np.searchsorted(reached, k))
    if reached[_BUCKETS - 1 - last] > _RETRACED:
        return None
    done: list[Item] = []
    for b in range(_BUCKETS - 1, last - 1, -1):
        at = np.flatnonzero(bucket == b)
        items = list(zip((-x[at]).tolist(), at.tolist(), strict=True))
        if b > last:
            _std_sort(items)
        else:
            n = k - len(done)
            rest, items = items[n:], items[:n]
            _partial_sort(items, rest)
        done += items
    return _positions(done)


def _partial_sort(heap: list[Item], rest: Iterable[Item]) -> None:
    """Leaves in `heap` the len(heap) smallest of heap + rest, sorted."""
    n = len(heap)
    for parent in range((n - 2) // 2, -1, -1):
        _sift(heap, parent, n, heap[parent])
    for item in rest:
        if item[0] < heap[0][0]:
            _sift(heap, 0, n, item)
    for last in range(n - 1, 0, -1):
        item, heap[last] = heap[last], heap[0]
        _sift(heap, 0, last, item)


def _sift(heap: list[Item], hole: int, n: int, item: Item) -> None:
    """Puts item into the heap [0, n): the hole sinks to a leaf along the larger children, item rises from there."""
    top = hole
    while (child := 2 * hole + 2) <= n:
        if child == n or heap[child][0] < heap[child - 1][0]:
            child -= 1
        heap[hole] = heap[child]
        hole = child
    while hole > top and heap[(hole - 1) // 2][0] < item[0]:
        heap[hole] = heap[(hole - 1) // 2]
        hole = (hole - 1) // 2
    heap[hole] = item


def _std_sort(items: list[Item]) -> None:
    """`std::sort`: partitions down to short ranges, then one insertion sort, which is stable like Python's sort."""
    _introsort(items, 0, len(items), 2 * (len(items).bit_length() - 1))
    items.sort(key=lambda item: item[0])


def _introsort(items: list[Item], first: int, last: int, depth: int) -> None:
    while last - first > _INSERTION:
        if depth == 0:
            part = items[first:last]
            _partial_sort(part, ())
            items[first:last] = part
            return
        depth -= 1
        cut = _partition(items, first, last)
        _introsort(items, cut, last, depth)
        last = cut


def _partition(items: list[Item], first: int, last: int) -> int:
    """Moves the median of second, middle and last item to the front and parts the others around it."""
    median = _median(items, first + 1, first + (last - first) // 2, last - 1)
    items[first], items[median] = items[median], items[first]
    pivot = items[first][0]
    lo, hi = first + 1, last
    while True:
        while items[lo][0] < pivot:
            lo += 1
        hi -= 1
        while pivot < items[hi][0]:
            hi -= 1
        if lo >= hi:
            return lo
        items[lo], items[hi] = items[hi], items[lo]
        lo += 1


def _median(items: list[Item], a: int, b: int, c: int) -> int:
    ka, kb, kc = items[a][0], items[b][0], items[c][0]
    if ka < kb:
        return b if kb < kc else c if ka < kc else a
    return a if ka < kc else c if kb < kc else b
