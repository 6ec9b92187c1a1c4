"""Rows of logits: how likely the text's token was, how far two rows are apart, and llama.cpp's file of a base model's rows.

The file: "_logits_", int32 n_ctx, n_vocab, n_chunks, int32 tokens [n_chunks, n_ctx]; then for each predicted row float32 scale and
minimum, and a uint16 code for each token: log p = scale * code + minimum. Codes cover 16 nats below the likeliest token; what is
less likely is not told.
"""
from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

import ggraph

MAGIC = b"_logits_"
HEADER = struct.Struct("<8siii")
RANGE = 16.0            # nats that codes cover
Row = npt.NDArray[np.float32]


def log_sum_exp(row: Row) -> float:
    best = row.max()
    return float(best) + float(np.log(np.exp(row - best).sum(dtype=np.float64)))


def nll(row: Row, token: int) -> float:
    """Negative log-likelihood of a token, in nats."""
    return log_sum_exp(row) - float(row[token])


class Distance(NamedTuple):
    """Of one row from the base's: both negative log-likelihoods of the token, the divergence, whether the likeliest is the same."""
    nll: float
    nll_base: float
    kld: float
    same_top: bool


def distance(row: Row, base: Row, token: int) -> Distance:
    """Of two rows of logits [n_vocab]."""
    norm, norm_base = log_sum_exp(row), log_sum_exp(base)
    log_base = base - np.float32(norm_base)
    kld = _divergence(row - np.float32(norm), log_base, np.exp(log_base))
    return Distance(norm - float(row[token]), norm_base - float(base[token]), kld, bool(row.argmax() == base.argmax()))


def distance_from_saved(row: Row, log_base: Row, token: int) -> Distance:
    """Of a row of logits from log-probabilities of a file; what these do not tell is left out of the divergence."""
    norm = log_sum_exp(row)
    p = np.exp(log_base)
    p[log_base <= -RANGE] = 0
    kld = _divergence(row - np.float32(norm), log_base, p)
    return Distance(norm - float(row[token]), -float(log_base[token]), kld, bool(row.argmax() == log_base.argmax()))


def _divergence(log_p: Row, log_base: Row, p_base: Row) -> float:
    if np.isneginf(min(log_p.min(), log_base.min())):      # impossible to both: 0, and not -inf + inf
        gap = np.subtract(log_base, log_p, where=p_base > 0, out=np.zeros_like(log_p))
    else:
        gap = log_base - log_p
    return float(np.multiply(p_base, gap, out=gap).sum(dtype=np.float64))


def encode(row: Row) -> npt.NDArray[np.uint16]:
    """Logits [n_vocab] as the file has them: uint16 [4 + n_vocab, rounded up to even]."""
    high, low = row.max(), np.maximum(row.min(), row.max() - np.float32(RANGE))
    out = np.zeros(_width(len(row)), np.uint16)
    scale = (high - low) / np.float32(65535)
    minimum = np.float32(float(low) - log_sum_exp(row))
    out[:4] = np.array([scale, minimum], np.float32).view(np.uint16)
    if scale > 0:
        out[4:4 + len(row)] = np.rint(np.maximum(row - low, 0) * (np.float32(1) / scale))
    return out


def decode(codes: npt.NDArray[np.uint16], n_vocab: int) -> Row:
    """Log-probabilities float32 [n_vocab]."""
    scale, minimum = codes[:4].view(np.float32)
    row: Row = scale * codes[4:4 + n_vocab].astype(np.float32) + minimum
    return row


def _width(n_vocab: int) -> int:
    return 4 + n_vocab + n_vocab % 2


class LogitsFile:
    """A file of a base model's rows, open to read. `tokens` int32 [n_chunks, n_ctx]. Error for a file that is none, or is cut."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._file = open(self.path, "rb")  # noqa: SIM115
        try:
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    def _read_header(self) -> None:
        size = os.fstat(self._file.fileno()).st_size
        head = self._file.read(HEADER.size)
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise ggraph.Error(f"{self.path} is no file of log-probabilities; --save-all-logits writes one")
        _, self.n_ctx, self.n_vocab, self.n_chunks = HEADER.unpack(head)
        if min(self.n_ctx - 3, self.n_vocab, self.n_chunks) < 1:
            raise ggraph.Error(f"{self.path} is damaged: windows of {self.n_ctx} tokens, {self.n_chunks} of them, "
                               f"a vocabulary of {self.n_vocab}")
        self.first = self.n_ctx // 2
        self._begin = HEADER.size + 4 * self.n_ctx * self.n_chunks
        self._row = 2 * _width(self.n_vocab)
        want = self._begin + self._row * self.n_rows * self.n_chunks
        if size < want:
            raise ggraph.Error(f"{self.path} is cut short: it has {size} bytes of {want}; write it again")
        self.tokens = np.fromfile(self._file, "<i4", self.n_ctx * self.n_chunks).reshape(self.n_chunks, self.n_ctx)

    @property
    def n_rows(self) -> int:
        """Rows of each window."""
        return int(self.n_ctx - 1 - self.first)

    def row(self, chunk: int, row: int) -> Row:
        """Log-probabilities float32 [n_vocab] of one row of a window; nothing is kept."""
        self._file.seek(self._begin + self._row * (chunk * self.n_rows + row))
        return decode(np.fromfile(self._file, "<u2", self._row // 2), self.n_vocab)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> LogitsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class LogitsWriter:
    """Writes such a file; it gets its name when all is written."""

    def __init__(self, path: str | Path, tokens: Sequence[Sequence[int]], n_vocab: int):
        self.path = Path(path)
        self.n_rows = len(tokens[0]) - 1 - len(tokens[0]) // 2
        self._begin, self._row = HEADER.size + 4 * len(tokens) * len(tokens[0]), 2 * _width(n_vocab)
        self._temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        self._file = open(self._temporary, "wb")  # noqa: SIM115
        self._file.write(HEADER.pack(MAGIC, len(tokens[0]), n_vocab, len(tokens)))
        self._file.write(np.array(tokens, "<i4").tobytes())

    def write(self, chunk: int, row: int, logits: Row) -> None:
        """The row of logits [n_vocab] that is number `row` of its window."""
        self._file.seek(self._begin + self._row * (chunk * self.n_rows + row))
        self._file.write(encode(logits).tobytes())

    def __enter__(self) -> LogitsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()
        if kind is None:
            os.replace(self._temporary, self.path)
        else:
            self._temporary.unlink()
