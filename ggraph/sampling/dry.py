"""In: the last accepted tokens. Out: lower logits for tokens that would lengthen a repetition (DRY).

A repetition never reaches across a breaker: a string such as a newline, matched wherever tokens can spell it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np

from ggraph.sampling.candidates import Candidates, f32, log
from ggraph.sampling.state import Window

_LONGEST_BREAKER = 40  # bytes
_LONGEST_TAIL = 20  # tokens
_KEPT_TABLES = 16
_LOG_FLT_MAX = f32(88.7228391)

Tails = set[tuple[int, ...]]


@runtime_checkable
class Vocabulary(Protocol):
    """What DRY asks of a Vocab."""

    @property
    def n_vocab(self) -> int: ...

    def piece(self, id: int) -> bytes: ...

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]: ...


_tables: WeakKeyDictionary[Vocabulary, OrderedDict[tuple[bytes, ...], dict[int, Tails]]] = WeakKeyDictionary()
_lock = threading.Lock()


def breaker_table(vocab: Vocabulary, breakers: Iterable[str]) -> dict[int, Tails]:
    """Token that a breaker may start in -> the token sequences that complete it; () where that token holds all of it.

    It looks at every piece, so the last tables of a vocabulary are kept. Empty breakers are passed over, as llama.cpp does.
    """
    key = tuple(dict.fromkeys(b.encode(errors="replace")[:_LONGEST_BREAKER] for b in breakers if b))
    with _lock:
        cache = _tables.setdefault(vocab, OrderedDict())
        table = cache.pop(key, None)
    table = _table(vocab, key) if table is None else table
    with _lock:
        cache[key] = table
        while len(cache) > _KEPT_TABLES:
            cache.popitem(last=False)
    return table


def _table(vocab: Vocabulary, breakers: Sequence[bytes]) -> dict[int, Tails]:
    starts: dict[bytes, list[tuple[bytes, tuple[int, ...]]]] = {}       # of a breaker -> (it, the tokens of its rest)
    for breaker in breakers:
        for n in range(1, len(breaker)):
            tail = vocab.encode(breaker[n:].decode(errors="replace"), False, False)[:_LONGEST_TAIL]
            starts.setdefault(breaker[:n], []).append((breaker, tuple(tail)))
    whole, lengths, longest = set(breakers), sorted(set(map(len, breakers))), max(map(len, starts), default=0)
    table: dict[int, Tails] = {}
    for token in range(vocab.n_vocab):
        piece = vocab.piece(token)
        held = {piece[i:i + n] for n in lengths for i in range(len(piece) - n + 1)} & whole
        tails: Tails = {tail for n in range(1, min(len(piece), longest) + 1) for breaker, tail in starts.get(piece[-n:], ())
                        if breaker not in held}
        if held:
            tails.add(())
        if tails:
            table[token] = tails
    return table


class Dry(Window):
    """The window, and the breakers, which all clones share."""

    def __init__(self, n: int, breakers: dict[int, Tails]):
        super().__init__(n)
        self.breakers = breakers


def dry(c: Candidates, state: Dry, mult: f32, base: f32, allowed: int, last_n: int) -> None:
    recent = list(reversed(state.recent))  # newest first
    limit = _limit(recent, state.breakers)
    if len(recent) <= allowed or limit < allowed:
        return
    longest = {t: n for t, n in _extensions(recent, limit, allowed).items() if () not in state.breakers.get(t, ())}
    most = int(_LOG_FLT_MAX / log(base)) if base > f32(1.000001) else 0  # keeps base ** n below the largest float
    logits, at = c.writable(), c.find(longest)
    over = np.array([longest[t] - allowed for t in c.tokens(at)], np.float64)
    if most > 0:
        over = np.minimum(over, most)
    logits[at] -= (np.float64(mult) * np.float64(base) ** over).astype(f32)
    c.is_sorted = False


def _limit(recent: Sequence[int], breakers: dict[int, Tails]) -> int:
    """How many of the newest tokens follow the last breaker: no repetition may be longer."""
    for i, token in enumerate(recent):
        # what followed this token, oldest first, is recent[:i] from its end
        ends = [i - len(tail) for tail in breakers.get(token, ()) if tail == tuple(recent[i - len(tail) : i][::-1])]
        if ends:
            return min(ends)
    return len(recent)


def _extensions(recent: Sequence[int], limit: int, allowed: int) -> dict[int, int]:
    """Token -> the longest run of newest tokens (at least `allowed`) that it once followed."""
    longest: dict[int, int] = {}
    for k, n in enumerate(_repeats(recent, limit)):
        if k and n >= allowed:
            longest[recent[k - 1]] = max(n, longest.get(recent[k - 1], n))
    return longest


def _repeats(recent: Sequence[int], limit: int) -> list[int]:
    """For each k: how many tokens from k on equal the newest ones, at most `limit`. The Z algorithm: O(n)."""
    n = len(recent)
    z = [0] * n
    left = right = 0  # the match that reaches furthest: recent[left:right] = recent[:right - left]
    for k in range(1, n):
        known = z[k - left] if k < right else 0
        if k < right and known < right - k:
            z[k] = known
            continue
        end = max(k, right)
        while end < n and recent[end] == recent[end - k]:
            end += 1
        z[k] = min(end - k, limit)
        if end > k:
            left, right = k, end
    return z
