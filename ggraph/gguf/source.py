"""One mapped file and a cursor: steps over the values of a header, and decodes one when it is asked for.

In: the path of a file. Out: `Value`s, which say where something lies, and what they decode to. Every length and count
is checked against the file and against limits before anything is walked or held.
"""
from __future__ import annotations

import mmap
import os
import struct
from array import array
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ggraph.errors import GGUFError

Bytes = npt.NDArray[np.uint8]

MAX_NAME = 65535        # the specification's limit for keys; tensor names stay far below it
MAX_DEPTH = 4           # arrays of arrays of ...
MAX_VALUE = 1 << 30     # bytes of one string or array
MAX_STEPS = 1 << 24     # what is walked one by one when a file is opened: this bounds time and memory
STRING_STEPS, ENTRY_STEPS = 1, 64   # a string of an array; a key, tensor or inner array, which costs as much as 64

SCALARS = {0: ("UINT8", "<u1"), 1: ("INT8", "<i1"), 2: ("UINT16", "<u2"), 3: ("INT16", "<i2"), 4: ("UINT32", "<u4"),
           5: ("INT32", "<i4"), 6: ("FLOAT32", "<f4"), 7: ("BOOL", "<u1"), 10: ("UINT64", "<u8"), 11: ("INT64", "<i8"),
           12: ("FLOAT64", "<f8")}
NUMPY = {name: np.dtype(code) for name, code in SCALARS.values()}
STRING, ARRAY = 8, 9


class Value(NamedTuple):
    """Where one value lies in the file. `kind` is "UINT32", "STRING", "ARRAY:STRING", ..."""
    kind: str
    pos: int                        # first byte of the scalar, of the string's length, or of the first element
    n: int = 1                      # elements; bytes of a STRING
    starts: array[int] | None = None        # ARRAY:STRING only: where each string's length stands, and the end
    items: tuple[Value, ...] = ()           # ARRAY:ARRAY only


class Source:
    """One mapped file and a cursor. Every read is checked against the size of the file."""

    def __init__(self, path: Path):
        self.path, self.pos, self.n_steps = path, 0, 0
        try:
            with path.open("rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                if self.size == 0:
                    raise GGUFError(f"{path}: the file is empty: download it again")
                self.mm: mmap.mmap | None = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise GGUFError(f"{path}: cannot open it: {reason}") from None
        self.bytes: Bytes | None = np.frombuffer(self.mm, np.uint8)
        self.address: int = self.bytes.ctypes.data

    def close(self) -> None:
        mm, self.mm, self.bytes = self.mm, None, None
        if mm is not None:
            with suppress(BufferError):     # arrays handed out still show these bytes: the map goes with the last one
                mm.close()

    def fail(self, what: str) -> GGUFError:
        return GGUFError(f"{self.path}: {what}")

    def open_map(self) -> mmap.mmap:
        if self.mm is None:
            raise self.fail("the file was closed: open it again")
        return self.mm

    def view(self, pos: int, nbytes: int) -> Bytes:
        if self.bytes is None:
            raise self.fail("the file was closed: open it again")
        return self.bytes[pos:pos + nbytes]

    def take(self, nbytes: int, what: str) -> int:
        """Step over `nbytes`; returns where they start."""
        pos, end = self.pos, self.pos + nbytes
        if end > self.size:
            raise self.fail(f"the header is cut short or damaged: {what} needs bytes {pos} to {end}, "
                            f"the file has {self.size}: download it again")
        self.pos = end
        return pos

    def take_value(self, nbytes: int, what: str) -> int:
        if nbytes > MAX_VALUE:
            raise self.fail(f"{what} claims {nbytes} bytes (at most {MAX_VALUE}): the header is damaged: download it again")
        return self.take(nbytes, what)

    def number(self, code: str, what: str) -> int:
        return int(struct.unpack_from(code, self.open_map(), self.take(struct.calcsize(code), what))[0])

    def name(self, what: str) -> str:
        """A key or a tensor name: short and valid UTF-8."""
        n = self.number("<Q", f"the length of {what}")
        if n > MAX_NAME:
            raise self.fail(f"{what} has a length of {n} bytes (at most {MAX_NAME}): the header is damaged: download it again")
        pos = self.take(n, what)
        raw = self.open_map()[pos:pos + n]
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8: {raw[:40]!r}: the header is damaged: download it again") from None

    def value(self, type_id: int, what: str, depth: int = 0) -> Value:
        """Step over one value, remembering only where it lies."""
        if type_id in SCALARS:
            kind, code = SCALARS[type_id]
            return Value(kind, self.take(np.dtype(code).itemsize, what))
        if type_id == STRING:
            n = self.number("<Q", f"the length of {what}")
            return Value("STRING", self.take_value(n, what), n)
        if type_id == ARRAY:
            return self.array(what, depth)
        raise self.fail(f"{what} has value type {type_id}, which GGUF does not have: the header is damaged, "
                        "or newer than this version of ggraph")

    def array(self, what: str, depth: int) -> Value:
        item_type = self.number("<I", f"the element type of {what}")
        n = self.number("<Q", f"the element count of {what}")
        if item_type in SCALARS:
            kind, code = SCALARS[item_type]
            return Value(f"ARRAY:{kind}", self.take_value(n * np.dtype(code).itemsize, what), n)
        if item_type == STRING:
            return self.strings(what, n)
        if item_type != ARRAY:
            raise self.fail(f"{what} is an array of value type {item_type}, which GGUF does not have: "
                            "the header is damaged, or newer than this version of ggraph")
        if depth + 1 >= MAX_DEPTH:
            raise self.fail(f"{what} nests arrays deeper than {MAX_DEPTH}: the header is damaged: download it again")
        self.spend(n, 12, ENTRY_STEPS, f"{what}: array of {n} arrays")
        pos = self.pos
        return Value("ARRAY:ARRAY", pos, n, None, tuple(self.array(what, depth + 1) for _ in range(n)))

    def spend(self, n: int, least: int, steps: int, what: str) -> None:
        """Refuse a count of entries, `least` bytes each, that the file cannot hold or that would take too long."""
        self.n_steps += n * steps
        if n * least > self.size - self.pos or self.n_steps > MAX_STEPS:
            raise self.fail(f"{what}: that is more than the file can hold or a model can need: "
                            "it is cut short or damaged: download it again")

    def strings(self, what: str, n: int) -> Value:
        """Walk an array of strings. This loop is most of the time it takes to open a file."""
        self.spend(n, 8, STRING_STEPS, f"{what}: array of {n} strings")
        pos, length_at, mm, starts = self.pos, struct.Struct("<Q").unpack_from, self.open_map(), array("q")
        at = pos
        try:
            for _ in range(n):
                starts.append(at)
                at += 8 + length_at(mm, at)[0]
            starts.append(at)
        except (struct.error, OverflowError, IndexError):
            at += 8     # this length lies beyond the end
        self.take_value(at - pos, f"string {min(len(starts), n)} of {n} of {what}")
        return Value("ARRAY:STRING", pos, n, starts)

    def decode(self, v: Value) -> Any:
        """The Python value: int, float, bool, str; a read-only NumPy array, a list of str, a list of lists."""
        if v.kind == "STRING":
            return self.open_map()[v.pos:v.pos + v.n].decode(errors="replace")
        if v.kind == "ARRAY:STRING":
            return [s.decode(errors="replace") for s in self.raw_strings(v)]
        if v.kind == "ARRAY:ARRAY":
            return [self.decode(item) for item in v.items]
        kind = v.kind.removeprefix("ARRAY:")
        numbers = np.frombuffer(self.open_map(), NUMPY[kind], v.n, v.pos)
        numbers = numbers != 0 if kind == "BOOL" else numbers.copy()        # a copy is aligned and outlives the file
        if kind == v.kind:
            return numbers[0].item()
        numbers.flags.writeable = False
        return numbers

    def raw_strings(self, v: Value) -> list[bytes]:
        assert v.starts is not None
        starts = np.frombuffer(v.starts, np.int64) - v.pos
        blob = self.open_map()[v.pos:v.pos + int(starts[-1])]
        return [blob[a:b] for a, b in zip((starts[:-1] + 8).tolist(), starts[1:].tolist())]
