"""Reads GGUF files: key/values and the tensor directory, through mmap.

In: the path of a file, or of any part of a split set. Out: `File` with `kv` (a mapping that decodes large values
on first access) and `tensors` (name -> TensorInfo, whose `data` are the mapped bytes). Anything malformed is a
GGUFError. It must not know architectures, tokenizers or maths: only bytes, names, shapes and types.
Layout of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""
from __future__ import annotations

import mmap
import os
import re
import struct
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ggraph import dtypes
from ggraph.errors import GGUFError

Bytes = npt.NDArray[np.uint8]

MAX_DIMS = 4
MAX_NAME = 65535        # the specification's limit for keys; tensor names stay far below it
MAX_DEPTH = 4           # arrays of arrays of ...
MAX_VALUE = 1 << 30     # bytes of one string or array
MAX_STEPS = 1 << 24     # what is walked one by one when a file is opened: this bounds time and memory
STRING_STEPS, ENTRY_STEPS = 1, 64   # a string of an array; a key, tensor or inner array, which costs as much as 64
DEFAULT_ALIGNMENT = 32
MAX_SPLIT = 99999
SPLIT_NAME = "{}-{:05d}-of-{:05d}.gguf"

SCALARS = {0: ("UINT8", "<u1"), 1: ("INT8", "<i1"), 2: ("UINT16", "<u2"), 3: ("INT16", "<i2"), 4: ("UINT32", "<u4"),
           5: ("INT32", "<i4"), 6: ("FLOAT32", "<f4"), 7: ("BOOL", "<u1"), 10: ("UINT64", "<u8"), 11: ("INT64", "<i8"),
           12: ("FLOAT64", "<f8")}
NUMPY = {name: np.dtype(code) for name, code in SCALARS.values()}
STRING, ARRAY = 8, 9

# Types that once had an id and that llama.cpp no longer reads (enum ggml_type, the gaps).
REMOVED_TYPES = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4",
                 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}

# What people save as .gguf by mistake: (first bytes, in lower case; what it is and what to do).
LOOKALIKES = (
    (b"<", "it is a web page (HTML or XML), not a model: download the file itself, "
           "on Hugging Face through the link that has /resolve/ in it"),
    (b"version https://git-lfs", "it is a git-lfs pointer, not the model: run `git lfs pull`, or download the file"),
    (b"pk\x03\x04", "it is a zip archive or a PyTorch checkpoint: unpack it, or convert it to GGUF"),
    (b"\x1f\x8b", "it is compressed with gzip: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "it is compressed with zstd: unpack it first"),
    ((b"lmgg", b"fmgg", b"tjgg"), "it is a GGML file from before GGUF: download a GGUF of this model"),
    (b"alag", "it is a LoRA file from before GGUF: convert it again"),
    (b"{", "it is JSON text, not a model: download the file itself"),
    (b"\0\0\0\0", "it starts with zeros, so the download was probably never finished: download it again"),
)
# A file cut with `split` or by an uploader: its pieces must be joined, unlike the parts that gguf-split makes.
RAW_PIECE = re.compile(r"[.-](part-?\d+of\d+|split-?[a-z0-9]{1,3}|part-?[a-z0-9]{1,3}|\d{3})$", re.IGNORECASE)


class Value(NamedTuple):
    """Where one value lies in the file. `kind` is "UINT32", "STRING", "ARRAY:STRING", ..."""
    kind: str
    pos: int                        # first byte of the scalar, of the string's length, or of the first element
    n: int = 1                      # elements; bytes of a STRING
    starts: array[int] | None = None        # ARRAY:STRING only: where each string's length stands, and the end
    items: tuple[Value, ...] = ()           # ARRAY:ARRAY only


class Fault(NamedTuple):
    """What is wrong with one tensor of a file that can be read apart from it."""
    tensor: str
    message: str


class _Map:
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


class KV(Mapping[str, Any]):
    """The key/values of a file, in file order; each is decoded when it is first asked for.

    Scalars are int, float, bool or str; arrays of numbers read-only NumPy arrays; arrays of strings list[str]
    (bytes that are not UTF-8 become U+FFFD: `raw_strings` has them exact); arrays of arrays lists.
    """

    def __init__(self, source: _Map, values: dict[str, Value], spans: dict[str, tuple[int, int]]):
        self._source, self._values, self._spans = source, values, spans
        self._decoded: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._decoded:
            self._decoded[key] = self._source.decode(self._values[key])
        return self._decoded[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def kind(self, key: str) -> str:
        """The value's type in the file: "UINT32", "STRING", "ARRAY:FLOAT32", ... KeyError if there is no such key."""
        return self._values[key].kind

    def n(self, key: str) -> int:
        """Number of elements of an array, without decoding it; bytes of a string; 1 for a number."""
        return self._values[key].n

    def raw(self, key: str) -> bytes:
        """The value as it stands in the file: the id of its type, then its bytes."""
        start, end = self._spans[key]
        return bytes(self._source.view(start, end - start))

    def raw_strings(self, key: str) -> list[bytes]:
        """An array of strings as the exact bytes in the file."""
        value = self._values[key]
        if value.kind != "ARRAY:STRING":
            raise self._source.fail(f"{key} should be an array of strings but is {value.kind}")
        return self._source.raw_strings(value)


class TensorInfo:
    """One entry of the tensor directory.

    `ne`: elements per axis, contiguous axis first, 1 to 4 axes. `offset`: first byte in the file of `shard`.
    An id that this version does not know makes `type`, `nbytes` and `data` raise GGUFError; the rest is readable.
    """
    __slots__ = ("_source", "name", "ne", "offset", "shard", "type_id")

    def __init__(self, name: str, ne: tuple[int, ...], type_id: int, offset: int, shard: int, source: _Map):
        self.name, self.ne, self.type_id, self.offset, self.shard = name, ne, type_id, offset, shard
        self._source = source

    @property
    def type(self) -> dtypes.DType:
        if self.type_id in dtypes.BY_ID:
            return dtypes.BY_ID[self.type_id]
        if self.type_id in REMOVED_TYPES:
            raise self._source.fail(f"tensor {self.name!r} has type {REMOVED_TYPES[self.type_id]}, which llama.cpp "
                                    "removed: download or make a newer file")
        raise self._source.fail(f"tensor {self.name!r} has tensor type {self.type_id}, which this version of ggraph "
                                "does not know: update ggraph, or the file is damaged")

    @property
    def known(self) -> bool:
        return self.type_id in dtypes.BY_ID

    @property
    def n_elements(self) -> int:
        n = 1
        for ne in self.ne:
            n *= ne
        return n

    @property
    def nbytes(self) -> int:
        return self.type.row_bytes(self.n_elements)

    @property
    def data(self) -> Bytes:
        """Read-only uint8 [nbytes]: the mapped bytes. They stay valid after the File is closed."""
        return self._source.view(self.offset, self.nbytes)

    @property
    def address(self) -> int:
        """Where `data` lies in memory; valid while the File is open or `data` is held."""
        return self._source.address + self.offset

    def __repr__(self) -> str:
        type_name = self.type.name if self.known else f"type {self.type_id}"
        return f"TensorInfo({self.name!r}, {list(self.ne)}, {type_name})"


class _Shard:
    """One file of the set, read and checked. `no` is its place among the `n_split` files of its set."""

    def __init__(self, path: Path, faults: list[Fault] | None = None):
        self.source, self.faults = _Map(path), faults
        try:
            self._read_header()
        except GGUFError:
            self.source.close()
            piece = RAW_PIECE.search(path.name)
            if piece is None:
                raise
            whole = path.name[:piece.start()]
            raise self.source.fail("by its name this is a raw piece of a larger file: join all pieces in order, for "
                                   f"example `cat {whole}{piece[0][0]}* > {whole.removesuffix('.gguf')}.gguf`, "
                                   "and open the result") from None

    def _read_header(self) -> None:
        source = self.source
        self._check_magic()
        self.version = self._read_version()
        n_tensors, n_kv = source.number("<Q", "the tensor count"), source.number("<Q", "the key/value count")
        source.spend(n_kv, 13, ENTRY_STEPS, f"{n_kv} key/values")
        self.kv = KV(source, *self._read_values(n_kv))
        self.n_split, self.no = self._read_split()
        self.alignment = self._read_alignment()
        source.spend(n_tensors, 24, ENTRY_STEPS, f"{n_tensors} tensors")
        self.tensors = self._read_tensors(n_tensors)
        self._check_extents()

    def _check_magic(self) -> None:
        source = self.source
        start = bytes(source.view(0, 512))
        if start[:4] == b"GGUF":
            source.pos = 4
            return
        looks = start.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
        for first, hint in LOOKALIKES:
            if looks.startswith(first):
                raise source.fail(f"not a GGUF file: {hint}")
        if start[8:10] == b'{"':
            raise source.fail("not a GGUF file: it looks like safetensors: convert it to GGUF")
        raise source.fail(f"not a GGUF file: it starts with {start[:4]!r} instead of b'GGUF': "
                          "check that this is the right file, or download it again")

    def _read_version(self) -> int:
        version = self.source.number("<I", "the version")
        if version in (2, 3):
            return version
        if version & 0xFFFF == 0 and version:
            raise self.source.fail("the file is big-endian (made for s390x or the like): "
                                   "download or convert a little-endian file")
        if version == 1:
            raise self.source.fail("GGUF version 1 (August 2023) is not supported: download or convert a newer file")
        raise self.source.fail(f"GGUF version {version} is not supported (2 and 3 are): "
                               "update ggraph, or the file is damaged")

    def _fault(self, tensor: str, what: str) -> None:
        """Raise, unless faults of single tensors are collected."""
        if self.faults is None:
            raise self.source.fail(what)
        self.faults.append(Fault(tensor, what))

    def _read_values(self, n_kv: int) -> tuple[dict[str, Value], dict[str, tuple[int, int]]]:
        """The values, and where each begins (with the id of its type) and ends."""
        source, values, spans = self.source, dict[str, Value](), dict[str, tuple[int, int]]()
        for i in range(n_kv):
            key = source.name(f"key {i}")
            if not key or key in values:
                raise source.fail(f"key {i} is " + (f"{key!r} for the second time" if key else "empty")
                                  + ": the header is damaged: download it again")
            start = source.pos
            type_id = source.number("<I", f"the value type of {key!r}")
            values[key] = source.value(type_id, repr(key))
            spans[key] = start, source.pos
        return values, spans

    def _read_split(self) -> tuple[int, int]:
        """(files in the set, place of this one), (1, 0) if it stands alone."""
        count, no = self.kv.get("split.count", 0), self.kv.get("split.no", 0)
        if type(count) is not int or type(no) is not int or not 0 <= no < max(count, 1) <= MAX_SPLIT:
            raise self.source.fail(f"split.count is {count!r} and split.no {no!r}: the header is damaged: download it again")
        return max(count, 1), no

    def _read_alignment(self) -> int:
        alignment = self.kv.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise self.source.fail(f"general.alignment is {alignment!r}, but must be an integer power of two: "
                                   "the header is damaged: download it again")
        return alignment

    def _read_tensors(self, n_tensors: int) -> dict[str, TensorInfo]:
        source, tensors = self.source, dict[str, TensorInfo]()
        self.twice: list[TensorInfo] = []
        for i in range(n_tensors):
            tensor = self._read_tensor(i)
            if tensor.name in tensors:
                self._fault(tensor.name, f"two tensors are called {tensor.name!r}: the file is damaged or badly made, "
                                         "download or convert it again")
                self.twice.append(tensor)
            else:
                tensors[tensor.name] = tensor
        start = -(-source.pos // self.alignment) * self.alignment
        for tensor in (*tensors.values(), *self.twice):
            tensor.offset += start
        return tensors

    def _read_tensor(self, i: int) -> TensorInfo:
        source = self.source
        name = source.name(f"the name of tensor {i}")
        n_dims = source.number("<I", f"the number of dimensions of {name!r}")
        if n_dims > MAX_DIMS:
            raise source.fail(f"tensor {name!r} has {n_dims} dimensions (at most {MAX_DIMS})"
                              ": the header is damaged: download it again")
        pos = source.take(8 * n_dims + 12, f"the shape, type and offset of {name!r}")
        *ne, type_id, offset = struct.unpack_from(f"<{n_dims}QIQ", source.open_map(), pos)
        tensor = TensorInfo(name, tuple(ne) or (1,), type_id, offset, self.no, source)
        if max(tensor.ne) >= 1 << 63 or tensor.n_elements >= 1 << 63:
            raise source.fail(f"tensor {name!r} has the shape {list(tensor.ne)}, which no file can hold: "
                              "the header is damaged: download it again")
        if tensor.known and tensor.ne[0] % tensor.type.block:
            raise source.fail(f"tensor {name!r} has rows of {tensor.ne[0]} elements, but {tensor.type} comes in blocks "
                              f"of {tensor.type.block}: the header is damaged, or the file was badly made")
        if offset % self.alignment:
            raise source.fail(f"tensor {name!r} has offset {offset}, not a multiple of the alignment {self.alignment}: "
                              "the header is damaged: download it again")
        return tensor

    def _check_extents(self) -> None:
        """Every tensor of a known type lies inside the file, and none reaches into another."""
        source = self.source
        sized = [(t.offset, t.nbytes if t.known else 0, t.name) for t in self.tensors.values()]
        for offset, nbytes, name in sized:
            if offset + nbytes > source.size:
                self._fault(name, f"the file is cut short or its header damaged: tensor {name!r} ends at byte "
                                  f"{offset + nbytes}, the file has {source.size} bytes: download it again")
        sized.sort()
        for (offset, nbytes, name), (next_offset, _, next_name) in pairwise(sized):
            if offset + nbytes > next_offset:
                self._fault(next_name, f"tensors {name!r} and {next_name!r} overlap: the header is damaged: download it again")


class File:
    """A GGUF file, or a whole split set opened through any of its parts. A context manager.

    `kv` and `version`, `alignment` are those of the first part; `tensors` has those of all parts in file order;
    `size` is the bytes of all parts. Raises GGUFError when anything is missing or malformed. With a list for `faults`, what
    is wrong with single tensors (there twice, cut short, overlapping) goes there instead: of two, the first is in `tensors`
    and the other in `twice`, and `data` of what is cut short has only the bytes that are there.
    """

    def __init__(self, path: str | os.PathLike[str], faults: list[Fault] | None = None):
        self.path, self._faults = Path(path), faults
        self._shards = [_Shard(self.path, faults)]
        try:
            self._open_set()
            self.tensors = self._join_tensors()
        except BaseException:
            self.close()
            raise
        first = self._shards[0]
        self.kv, self.version, self.alignment = first.kv, first.version, first.alignment
        self.paths = [s.source.path for s in self._shards]
        self.size = sum(s.source.size for s in self._shards)
        self.twice = [tensor for s in self._shards for tensor in s.twice]

    def _open_set(self) -> None:
        """Open the other files of the set of which one is open."""
        opened = self._shards[0]
        count, ending = opened.n_split, SPLIT_NAME.format("", opened.no + 1, opened.n_split)
        if count == 1:
            return
        if not self.path.name.endswith(ending):
            raise opened.source.fail(f"it says that it is part {opened.no + 1} of {count}, so its name must end in "
                                     f"{ending!r}: rename the parts as they were when published")
        prefix = self.path.name.removesuffix(ending)
        paths = [self.path.with_name(SPLIT_NAME.format(prefix, i + 1, count)) for i in range(count)]
        missing = [p.name for p in paths if not p.is_file()]
        if missing:
            names = ", ".join(missing[:20]) + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
            raise opened.source.fail(f"{len(missing)} of the {count} parts of the set are missing, download them "
                                     f"into the same folder: {names}")
        for i, path in enumerate(paths):
            if i != opened.no:
                self._shards.insert(i, _Shard(path, self._faults))
        self._check_set(count)

    def _check_set(self, count: int) -> None:
        for i, shard in enumerate(self._shards):
            if (shard.n_split, shard.no) != (count, i):
                raise shard.source.fail(f"it does not say that it is part {i + 1} of {count}, as its name does: "
                                        "it belongs to another set, download it again")
        n_tensors, first = sum(len(s.tensors) for s in self._shards), self._shards[0]
        expected = first.kv.get("split.tensors.count", n_tensors)
        if n_tensors != expected:
            raise first.source.fail(f"the {count} parts hold {n_tensors} tensors, {expected} are promised: "
                                    "the parts do not belong together, download them again")

    def _join_tensors(self) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for shard in self._shards:
            twice = tensors.keys() & shard.tensors.keys()
            if twice:
                raise shard.source.fail(f"tensor {min(twice)!r} is also in an earlier part of the set: "
                                        "the parts do not belong together, download them again")
            tensors |= shard.tensors
        return tensors

    @property
    def arch(self) -> str:
        """general.architecture."""
        arch = self.kv.get("general.architecture")
        if not isinstance(arch, str) or not arch:
            raise GGUFError(f"{self.path}: general.architecture is missing or not a name, so the file does not say "
                            "what kind of model it is: convert it again")
        return arch

    def close(self) -> None:
        """Unmap. Arrays handed out stay valid; anything not decoded yet raises GGUFError."""
        for shard in self._shards:
            shard.source.close()

    def __enter__(self) -> File:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
