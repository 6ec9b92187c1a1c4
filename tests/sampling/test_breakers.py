"""Breakers of DRY come from requests: their tables are exact, soon made, and do not pile up."""
from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ggraph.sampling import dry


class Pieces:
    def __init__(self, pieces: list[bytes]):
        self.pieces = pieces
        self.n_vocab = len(pieces)

    def piece(self, id: int) -> bytes:
        return self.pieces[id]

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        return [b % 7 for b in text.encode()]


def plain(vocab: Pieces, breakers: list[str]) -> dict[int, dry.Tails]:
    """One breaker and one piece after the other."""
    table: dict[int, dry.Tails] = {}
    for breaker in filter(None, breakers):
        for token, piece in enumerate(vocab.pieces):
            if breaker.encode() in piece:
                table.setdefault(token, set()).add(())
                continue
            for n in range(1, len(breaker)):
                if piece.endswith(breaker[:n].encode()):
                    table.setdefault(token, set()).add(tuple(vocab.encode(breaker[n:], False, False)))
    return table


words = st.text("abc", max_size=5)


@given(st.lists(words.map(str.encode), min_size=1, max_size=10), st.lists(words, max_size=4))
def test_tables(pieces: list[bytes], breakers: list[str]) -> None:
    vocab = Pieces(pieces)
    assert dry.breaker_table(vocab, breakers) == plain(vocab, breakers)


def test_few_tables_are_kept() -> None:
    vocab = Pieces([b"a", b"b"])
    for i in range(100):
        dry.breaker_table(vocab, [str(i)])
    assert len(dry._tables[vocab]) == 16
