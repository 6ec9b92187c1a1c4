"""What a batch accepts, what validation refuses and how it says so, and the three splits."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggraph.batch import Batch, Ubatch, split_equal, split_simple, validate
from ggraph.errors import BatchError

SETS = st.sampled_from([(0,), (1,), (2,), (3,), (0, 1), (2, 3), (0, 1, 2, 3)])


def batch_of(*rows: tuple[int, Any, Any]) -> Batch:
    batch = Batch()
    for token, pos, seq in rows:
        batch.add(token, pos, seq)
    return batch


def check(batch: Batch, held: Sequence[int] = (-1, -1, -1, -1), **options: Any) -> Ubatch:
    return validate(batch, n_vocab=100, n_seq_max=4, n_ctx=64, pos_max=lambda s: held[s], **options)


# Batch

def test_rows_become_arrays() -> None:
    batch = Batch()
    assert len(batch) == 0
    batch.add(5, None, 0)
    batch.add(np.int32(6), 7, np.array([2, 1, 2]), output=True)
    assert len(batch) == 2 and batch.embd is None
    assert batch.token is not None and batch.token.tolist() == [5, 6] and batch.token.dtype == np.int32
    assert batch.pos.tolist() == [[-1, 7]] and batch.pos.dtype == np.int32
    assert batch.seq_id == [(0,), (1, 2)] and batch.output.tolist() == [False, True]
    batch.clear()
    assert len(batch) == 0


def test_embeddings_in_place_of_tokens() -> None:
    batch = Batch()
    batch.add_embd([1, 2, 3], (4, 5, 6, 7), 0)
    batch.add_embd(np.zeros(3), 5, 0)
    assert batch.token is None and batch.pos.tolist() == [[4, 5], [5, 5], [6, 5], [7, 0]]
    assert batch.embd is not None and batch.embd.shape == (2, 3) and batch.embd.dtype == np.float32


def test_a_vector_is_copied() -> None:
    batch, x = Batch(), np.ones(2, np.float32)
    batch.add_embd(x, None, 0)
    x[:] = 0
    assert batch.embd is not None and batch.embd.tolist() == [[1, 1]]


def test_rows_that_no_batch_takes() -> None:
    batch = batch_of((1, None, 0))
    with pytest.raises(BatchError, match="tokens or embeddings, not both"):
        batch.add_embd([1.0], None, 0)
    with pytest.raises(BatchError, match="token 1 belongs to no sequence"):
        batch.add(1, None, ())
    with pytest.raises(BatchError, match="token 1 has 3 positions; give one, or 4"):
        batch.add(1, (1, 2, 3), 0)      # type: ignore[arg-type]
    with pytest.raises(TypeError):
        batch.add(1.5, None, 0)         # type: ignore[arg-type]
    assert len(batch) == 1
    batch.clear()
    batch.add_embd([1.0, 2.0], None, 0)
    with pytest.raises(BatchError, match="tokens or embeddings, not both"):
        batch.add(1, None, 0)
    with pytest.raises(BatchError, match=r"embedding 1 has shape \[3\], expected \[2\]"):
        batch.add_embd([1, 2, 3], None, 0)
    with pytest.raises(BatchError, match=r"shape \[\], expected \[2\]"):
        batch.add_embd(1.0, None, 0)
    assert len(batch) == 1


# validate

def test_positions_come_from_memory() -> None:
    u = check(batch_of((1, None, 0), (2, None, 1), (3, None, 0), (4, 9, 1), (5, None, (2, 3))), [4, 7, -1, -1])
    assert u.pos.tolist() == [[5, 8, 6, 9, 0]] and u.seq.tolist() == [0, 1, 0, 1, 2]
    assert u.seq_ids == ((0,), (1,), (0,), (1,), (2, 3)) and u.rows.tolist() == [0, 1, 2, 3, 4]
    assert (u.n_tokens, u.n_seqs, u.n_seq_tokens) == (5, 1, 5)
    assert list(u.sets())[:2] == [((0,), slice(0, 1)), ((1,), slice(1, 2))]


def test_a_new_sequence_starts_anywhere() -> None:
    assert check(batch_of((1, 17, 0), (1, None, 0))).pos.tolist() == [[17, 18]]


REFUSED: list[tuple[list[tuple[int, Any, Any]], str]] = [
    ([], "the batch is empty"),
    ([(1, None, 0), (100, None, 0)], "token 1 has id 100; the vocabulary has ids 0 to 99"),
    ([(-1, None, 0)], "token 0 has id -1"),
    ([(2**70, None, 0)], "token 0 has id 1180591620717411303424"),
    ([(1, None, 4)], r"token 0 is of sequence 4; this context has 0 to 3 \(n_seq_max\)"),
    ([(1, None, (0, -1))], "token 0 is of sequence -1"),
    ([(1, 2, 0)], "token 0 of sequence 0 has position 2, but the sequence is at 4: position 5 must follow"),
    ([(1, 5, 0), (1, 7, 0)], "token 1 of sequence 0 has position 7, but the sequence is at 5: position 6 must follow"),
    ([(1, 5, 0), (1, 5, 0)], "token 1 of sequence 0 has position 5, but the sequence is at 5"),
    ([(1, -3, 1)], "token 0 of sequence 1 has position -3; positions are 0 to"),
    ([(1, 2**31 - 1, 1)], "position 2147483647; positions are 0 to 2147483646"),
    ([(1, 2**70, 1)], "positions are 0 to"),
    ([(1, (5, 5, 5, 5), 0)], "token 0 has 4 positions; this model has one position axis"),
    ([(1, None, 1)] * 65, "token 64 is number 65 of sequence 1 in this batch; n_ctx is 64"),
    ([(1, None, (0, 1))], "token 0 is shared by sequences 0 and 1, which hold different tokens"),
    ([(1, None, (2, 3)), (1, None, 2), (1, None, (2, 3))], r"token 2 joins sequences \(2, 3\), but sequence 2 is among \(2,\)"),
    ([(1, None, (1, 2, 3)), (1, None, (1, 2)), (1, None, (2, 3))], r"token 2 joins sequences \(2, 3\), but sequence 2"),
]


@pytest.mark.parametrize("rows,message", REFUSED)
def test_refused(rows: list[tuple[int, Any, Any]], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        check(batch_of(*rows), [4, -1, -1, -1], same=lambda a, b: 0 not in (a, b))


def test_sequences_that_share_a_token_must_be_at_one_position() -> None:
    with pytest.raises(BatchError, match="token 0 of sequence 1 has position 3, but the sequence is at 1: position 2"):
        check(batch_of((1, None, (0, 1))), [2, 1, -1, -1])


def test_a_tree_of_sequences() -> None:
    u = check(batch_of((1, None, (0, 1, 2)), (2, None, (0, 1)), (3, None, 2), (4, None, 0), (5, None, 1), (6, None, (0,))))
    assert u.pos.tolist() == [[0, 1, 1, 2, 2, 3]]


def test_many_axes() -> None:
    u = check(batch_of((1, None, 0), (1, (7, 7, 7, 0), 0), (1, None, 0)), [4, -1, -1, -1], n_axes=4)
    assert u.pos.tolist() == [[5, 7, 8], [5, 7, 8], [5, 7, 8], [0, 0, 0]]
    assert check(batch_of((1, 9, 0)), [4, -1, -1, -1], n_axes=4).pos.tolist() == [[9]]
    with pytest.raises(BatchError, match="position 4, but the sequence is at 4"):
        check(batch_of((1, 4, 0)), [4, -1, -1, -1], n_axes=4)
    with pytest.raises(BatchError, match="repeats position 4 of sequence 0: images are not supported"):
        check(batch_of((1, (4, 4, 5, 0), 0)), [4, -1, -1, -1], n_axes=4)
    with pytest.raises(BatchError, match=r"has position \(5, -1, 0, 0\)"):
        check(batch_of((1, (5, -1, 0, 0), 0)), [4, -1, -1, -1], n_axes=4)


def test_size_of_embeddings() -> None:
    batch = Batch()
    batch.add_embd([1, 2], None, 0)
    assert check(batch, n_embd=2).token is None
    with pytest.raises(BatchError, match="the embeddings have 2 values, the model takes 3"):
        check(batch, n_embd=3)


# splits

def any_batch(sets: Sequence[tuple[int, ...]]) -> Ubatch:
    """A valid batch out of any list of sets: a set that would join what has parted is cut to its first sequence."""
    company: dict[int, set[int]] = {}
    last: dict[int, int] = {}
    batch = Batch()
    for i, s in enumerate(sets):
        same = len({last.get(x, -1) for x in s}) == 1
        seqs = s if same and all(set(s) <= company.get(x, set(s)) for x in s) else s[:1]
        company |= {x: set(seqs) for x in seqs}
        last |= {x: last.get(x, -1) + 1 for x in seqs}
        batch.add(i % 100, None, seqs, output=i % 3 == 0)
    return validate(batch, 100, 4, 10**6, lambda s: -1)


def check_split(batch: Ubatch, pieces: list[Ubatch], n_ubatch: int) -> None:
    """Every row once; in a piece by set and batch order; of one sequence, earlier rows never after later ones."""
    assert sorted(r for u in pieces for r in u.rows.tolist()) == list(range(batch.n_tokens))
    reached: dict[int, int] = {}
    for u in pieces:
        rows = u.rows.tolist()
        assert 0 < u.n_tokens <= n_ubatch and u.n_seqs * u.n_seq_tokens == u.n_tokens
        assert rows == sorted(rows, key=lambda r: (batch.seq_ids[r], r))
        assert batch.token is not None and u.token is not None
        assert np.array_equal(u.token, batch.token[rows]) and np.array_equal(u.pos, batch.pos[:, rows])
        assert np.array_equal(u.seq, batch.seq[rows]) and np.array_equal(u.output, batch.output[rows])
        assert u.seq_ids == tuple(batch.seq_ids[r] for r in rows)
        now = dict(reached)
        for r in rows:
            for s in batch.seq_ids[r]:
                assert r > reached.get(s, -1)
                now[s] = max(r, now.get(s, -1))
        reached = now


@settings(max_examples=200, deadline=None)
@given(st.lists(SETS, min_size=1, max_size=30), st.integers(1, 9))
def test_simple(sets: list[tuple[int, ...]], n_ubatch: int) -> None:
    batch = any_batch(sets)
    pieces = list(split_simple(batch, n_ubatch))
    check_split(batch, pieces, n_ubatch)
    assert [u.n_tokens for u in pieces[:-1]] == [n_ubatch] * (len(pieces) - 1)


@settings(max_examples=200, deadline=None)
@given(st.lists(SETS, min_size=1, max_size=30), st.integers(1, 9))
def test_equal(sets: list[tuple[int, ...]], n_ubatch: int) -> None:
    batch = any_batch(sets)
    pieces = list(split_equal(batch, n_ubatch))
    check_split(batch, pieces, n_ubatch)
    for u in pieces:
        here = list(u.sets())
        assert [r.stop - r.start for _, r in here] == [u.n_seq_tokens] * u.n_seqs
        assert len({s for seqs, _ in here for s in seqs}) == sum(len(seqs) for seqs, _ in here)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 9))
def test_equal_and_sequential(seqs: list[int], n_ubatch: int) -> None:
    batch = any_batch([(s,) for s in seqs])
    pieces = list(split_equal(batch, n_ubatch, sequential=True))
    check_split(batch, pieces, n_ubatch)
    for u in pieces:
        ids = u.seq[::u.n_seq_tokens].tolist()
        assert np.array_equal(u.seq, np.repeat(ids, u.n_seq_tokens)) and ids == list(range(ids[0], ids[0] + u.n_seqs))


def test_a_shared_token_has_no_stream() -> None:
    with pytest.raises(BatchError, match=r"sequences \(0, 1\) share a token.*kv_unified=True"):
        list(split_equal(any_batch([(2,), (0, 1)]), 4, sequential=True))


def test_splits_of_known_batches() -> None:
    """Two sequences of 5 and 3 tokens, one after the other, then a third."""
    batch = any_batch([(1,)] * 5 + [(0,)] * 3 + [(3,)])

    def rows(pieces: Any) -> list[list[int]]:
        return [u.rows.tolist() for u in pieces]
    assert rows(split_simple(batch, 6)) == [[5, 0, 1, 2, 3, 4], [6, 7, 8]]
    assert rows(split_equal(batch, 6)) == [[5, 0, 8], [6, 7, 1, 2], [3, 4]]
    assert rows(split_equal(batch, 6, sequential=True)) == [[5, 6, 7, 0, 1, 2], [3, 4], [8]]
    assert rows(split_equal(batch, 2, sequential=True)) == [[5, 0], [6, 1], [7, 2], [3, 4], [8]]
