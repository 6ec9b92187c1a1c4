"""The scales of a tensor's blocks: which are NaN, infinite, subnormal or zero, and in which block.

In: a tensor of a file. Out: counts and the first block of each kind. Only scales are looked at (and the values of unquantized
types, which have none), so it goes about as fast as the file can be read.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ggraph.dtypes import DType
from ggraph.gguf import TensorInfo
from ggraph.quants import QUANTS

CHUNK = 1 << 18                             # blocks looked at together
FIELDS = ("d", "dmin", "m")                 # what the scales of a block are called, in every type that has floats for them
# Bits of an infinity, by the bytes of a float and the type: float16, float32, and bfloat16 apart.
INFINITY = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F800000, "F64": 0x7FF0000000000000}
KINDS = ("NaN", "infinite", "subnormal", "zero")


@dataclass
class Scan:
    """Of one tensor. `n` and `first`: by (field, kind) how many blocks, and the first of them."""
    n_blocks: int
    n: dict[tuple[str, str], int] = field(default_factory=dict)
    first: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, name: str, kind: str, bad: np.ndarray, start: int) -> None:
        """`bad`: bool [n_blocks], or a row of values of each block."""
        found = np.flatnonzero(bad.reshape(len(bad), -1).any(axis=1))
        if len(found):
            self.n[name, kind] = self.n.get((name, kind), 0) + len(found)
            self.first.setdefault((name, kind), start + int(found[0]))


def scan(info: TensorInfo) -> Scan:
    """Look at every whole block whose bytes are there."""
    blocks = info.data
    blocks = blocks[:len(blocks) // info.type.nbytes * info.type.nbytes].view(QUANTS[info.type].layout)
    result = Scan(len(blocks))
    for start in range(0, len(blocks), CHUNK):
        for name, kind, bad in _bad(blocks[start:start + CHUNK], info.type):
            result.add(name, kind, bad, start)
    return result


def _bad(blocks: Any, dtype: DType) -> Iterator[tuple[str, str, np.ndarray]]:
    if dtype.name == "MXFP4":
        yield "e", "NaN", blocks["e"] == 0xFF          # what E8M0 calls NaN; ggml takes it for 2**127
    elif dtype.name == "NVFP4":
        yield "d", "NaN", blocks["d"] & 0x7F == 0x7F
        yield "d", "zero", blocks["d"] & 0x7F == 0
    elif dtype.name == "IQ1_M":                        # the top nibbles of four words
        words = blocks["scales"] >> 12
        yield from _floats("d", words[:, 0] | words[:, 1] << 4 | words[:, 2] << 8 | words[:, 3] << 12, INFINITY["F16"])
    elif not dtype.quantized:
        if dtype.name in INFINITY:                     # of plain values, zeros and subnormals say nothing
            bits = blocks["x"].view(f"u{dtype.nbytes}")
            yield from list(_floats("value", bits, INFINITY[dtype.name]))[:2]
    else:
        for name in FIELDS:
            if name in (dtype_fields := blocks.dtype.fields):
                kind = dtype_fields[name][0]
                values = np.ascontiguousarray(blocks[name])
                yield from _floats(name, values.view(f"u{kind.itemsize}"), INFINITY["F16" if kind.itemsize == 2 else "F32"])


def _floats(name: str, bits: np.ndarray, infinity: int) -> Iterator[tuple[str, str, np.ndarray]]:
    """Sorted by their bits, without the sign: zero, subnormal, ordinary, infinite, NaN."""
    magnitude = bits & bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1)
    least = 1 << (infinity & -infinity).bit_length() - 1
    yield name, "NaN", magnitude > infinity
    yield name, "infinite", magnitude == infinity
    yield name, "subnormal", (magnitude > 0) & (magnitude < least)
    yield name, "zero", magnitude == 0
