"""Ternary types: codes 0, 1, 2 for -1, 0, 1, and one scale for 256."""
from __future__ import annotations

import numpy as np

from ggraph import dtypes
from ggraph.quants.base import Array, Blocks, Quant, column, join, split


def _trits(qs: Array, n: int) -> Array:
    """[n_blocks, k] -> [n_blocks, n * k]: the first trit of every byte, then the second of every byte, ...

    A byte is the number 0.t1 t2 t3 t4 t5 in base 3, times 256: multiplied by 3**i (modulo 256, which drops the trits
    already read), the next trit is what carries over 256 when it is multiplied by 3 once more.
    """
    powers = np.uint8(3) ** np.arange(n, dtype=np.uint8)
    rest = qs[:, None, :] * powers[:, None]
    return (rest.astype(np.uint16) * np.uint16(3) >> np.uint16(8)).reshape(len(qs), -1)


def _round(x: Array) -> tuple[Array, Array]:
    """(d [n], codes [n, 256]): the largest magnitude is d, halves go away from zero."""
    d = np.abs(x).max(axis=-1, keepdims=True)
    q = x * np.where(d == 0, np.float32(0), np.float32(1) / d)
    whole = np.trunc(q)
    return d[:, 0], (whole + np.trunc((q - whole) * np.float32(2)) + 1).astype(np.uint8)


def _join_trits(t: Array) -> Array:
    """[n, 5, k], the first trit of every byte first, -> [n, k]."""
    number = np.zeros((len(t), t.shape[-1]), np.uint16)
    for i in range(t.shape[1]):
        number = number * np.uint16(3) + t[:, i]
    return ((number * np.uint32(256) + 242) // 243).astype(np.uint8)


class TQ1_0(Quant, dtype=dtypes.TQ1_0, layout=[("qs", "u1", 48), ("qh", "u1", 4), ("d", "<f2")]):
    """Five trits a byte: 32 bytes, then 16 bytes; the last 16 elements four a byte in qh."""

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        trits = [_trits(b["qs"][:, :32], 5), _trits(b["qs"][:, 32:], 5), _trits(b["qh"], 4)]
        return column(b["d"]) * (np.concatenate(trits, axis=-1).view(np.int16) - np.int16(1))

    @classmethod
    def pack(cls, x: Array) -> Blocks:
        b = np.empty(len(x), cls.layout)
        b["d"], t = _round(x)
        b["qs"][:, :32], b["qs"][:, 32:] = _join_trits(t[:, :160].reshape(-1, 5, 32)), _join_trits(t[:, 160:240].reshape(-1, 5, 16))
        last = t[:, 240:].reshape(-1, 4, 4)
        b["qh"] = _join_trits(np.concatenate([last, np.zeros_like(last[:, :1])], axis=1))
        return b


class TQ2_0(Quant, dtype=dtypes.TQ2_0, layout=[("qs", "u1", 64), ("d", "<f2")]):
    """Two bits each; each 32 bytes hold four runs of 32."""

    @classmethod
    def unpack(cls, b: Blocks) -> Array:
        q = split(b["qs"].reshape(-1, 2, 32), 2).reshape(-1, 256)
        return column(b["d"]) * (q.view(np.int8) - np.int8(1))

    @classmethod
    def pack(cls, x: Array) -> Blocks:
        b = np.empty(len(x), cls.layout)
        b["d"], t = _round(x)
        b["qs"] = join(t.reshape(-1, 2, 4, 32), 2).reshape(-1, 64)
        return b
