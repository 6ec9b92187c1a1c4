"""The header of one file: key/values and the tensor directory, checked.

In: the path of one file. Out: a `Shard` with `kv` (decodes large values on first access) and `tensors`, whose bytes all
lie inside the file. What is no GGUF is refused with what it looks like instead.
"""
from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ggraph import dtypes
from ggraph.errors import GGUFError

from .source import ENTRY_STEPS, Bytes, Source, Value

MAX_DIMS = 4
MAX_SPLIT = 99999
SPLIT_NAME = "{}-{:05d}-of-{:05d}.gguf"
DEFAULT_ALIGNMENT = 32

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


class Fault(NamedTuple):
    """What is wrong with one tensor of a file that can be read apart from it."""
    tensor: str
    message: str


class KV(Mapping[str, Any]):
    """The key/values of a file, in file order; each is decoded when it is first asked for.

    Scalars are int, float, bool or str; arrays of numbers read-only NumPy arrays; arrays of strings list[str]
    (bytes that are not UTF-8 become U+FFFD: `raw_strings` has them exact); arrays of arrays lists.
    """

    def __init__(self, source: Source, values: dict[str, Value], spans: dict[str, tuple[int, int]]):
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

    def __init__(self, name: str, ne: tuple[int, ...], type_id: int, offset: int, shard: int, source: Source):
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


class Shard:
    """One file of the set, read and checked. `no` is its place among the `n_split` files of its set."""

    def __init__(self, path: Path, faults: list[Fault] | None = None):
        self.source, self.faults = Source(path), faults
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
