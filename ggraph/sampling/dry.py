"""In: the last accepted tokens. Out: lower logits for tokens that would lengthen a repetition (DRY).

A repetition never reaches across a breaker: a string such as a newline, matched wherever tokens can spell it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np

from ggraph.sampling.candidates import Candidates, f32, log
from ggraph.sampling.state import Window

_LONGEST_BREAKER = 40  # bytes
_LONGEST_TAIL = 20  # tokens
_LOG_FLT_MAX = f32(88.7228391)

Tails = set[tuple[int, ...]]


@runtime_checkable
class Vocabulary(Protocol):
    """What DRY asks of a Vocab."""

    @property
    def n_vocab(self) -> int: ...

    def piece(self, id: int) -> bytes: ...

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]: ...


_tables: WeakKeyDictionary[Vocabulary, dict[tuple[str, ...], dict[int, Tails]]] = WeakKeyDictionary()


def breaker_table(vocab: Vocabulary, breakers: Iterable[str]) -> dict[int, Tails]:
    """Token that a breaker may start in -> the token sequences that complete it; () where that token holds all of it.

    Made once per vocabulary: it looks at every piece. Empty breakers are passed over, as llama.cpp does.
    """
    key = tuple(breakers)
    cache = _tables.setdefault(vocab, {})
    if key not in cache:
        table: dict[int, Tails] = {}
        pieces = [vocab.piece(i) for i in range(vocab.n_vocab)]
        for breaker in filter(None, key):
            _add_breaker(table, vocab, pieces, breaker.encode()[:_LONGEST_BREAKER])
        cache[key] = table
    return cache[key]


def _add_breaker(table: dict[int, Tails], vocab: Vocabulary, pieces: Sequence[bytes], breaker: bytes) -> None:
    starts = [(breaker[:n], breaker[n:].decode(errors="replace")) for n in range(1, len(breaker))]
    tails = [(start, tuple(vocab.encode(rest, False, False)[:_LONGEST_TAIL])) for start, rest in starts]
    for token, piece in enumerate(pieces):
        if breaker in piece:
            table.setdefault(token, set()).add(())
        else:
            for start, tail in tails:
                if piece.endswith(start):
                    table.setdefault(token, set()).add(tail)


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
