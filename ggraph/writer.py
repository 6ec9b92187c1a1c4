"""Writes GGUF files: the header first, then the tensors one after the other, into a temporary file that is renamed at the end.

In: key/values as bytes (`encode`, or `gguf.KV.raw` of another file, which keeps them as they are), and what tensors will
come. Out: a file under its name, whole or not at all. Like `gguf` it knows bytes, names, shapes and types only.
"""
from __future__ import annotations

import errno
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from ggraph.dtypes import DType
from ggraph.errors import GGUFError
from ggraph.gguf import ARRAY, DEFAULT_ALIGNMENT, MAX_NAME, NUMPY, SCALARS, SPLIT_NAME, STRING, File, TensorInfo

VERSION = 3
SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
_IDS = {name: id for id, (name, _) in SCALARS.items()} | {"STRING": STRING}


class Spec(NamedTuple):
    """A tensor to be written; `ne`: elements per axis, contiguous axis first."""
    name: str
    ne: tuple[int, ...]
    type: DType

    @property
    def nbytes(self) -> int:
        n = 1
        for ne in self.ne:
            n *= ne
        return self.type.row_bytes(n)


def encode(kind: str, value: Any) -> bytes:
    """A value as it stands in a file, the id of its type first. `kind` as in `gguf.KV.kind`: "UINT32", "ARRAY:STRING", ...

    GGUFError if the value is not of that kind or does not fit it.
    """
    outer, _, inner = kind.rpartition(":")
    if inner not in _IDS or outer not in ("", "ARRAY"):
        raise GGUFError(f"{kind} is not a type of a value; types: {', '.join(_IDS)}, and ARRAY: before one of them")
    try:
        if not outer:
            return struct.pack("<I", _IDS[inner]) + _payload(inner, [value])
        return struct.pack("<IIQ", ARRAY, _IDS[inner], len(value)) + _payload(inner, value)
    except (TypeError, ValueError, OverflowError, AttributeError) as e:
        raise GGUFError(f"{value!r} is not a value of type {kind}: {e}") from None


def _payload(kind: str, values: Sequence[Any]) -> bytes:
    if kind == "STRING":
        raw = [v if isinstance(v, bytes) else v.encode() for v in values]
        return b"".join(struct.pack("<Q", len(r)) + r for r in raw)
    code = NUMPY[kind]
    if kind == "BOOL" and not all(v in (0, 1) for v in values):
        raise ValueError("neither true nor false")
    if code.kind in "iu":
        limits = np.iinfo(code)
        if not all(limits.min <= int(v) <= limits.max and int(v) == v for v in values):
            raise ValueError(f"not whole numbers from {limits.min} to {limits.max}")
    return np.asarray(values, code).tobytes()


def raw_kv(file: File) -> dict[str, bytes]:
    """All key/values of a file as they stand in it, without those that tie it to a split set."""
    return {key: file.kv.raw(key) for key in file.kv if key not in SPLIT_KEYS}


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """An open temporary file beside `path` that takes its name when the block ends, and is removed if it fails."""
    target = Path(path)
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        handle, name = tempfile.mkstemp(prefix=f".{target.name[:200]}.", suffix=".tmp", dir=target.parent)
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(target)) from e      # not the temporary name
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)       # mkstemp makes files private
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


class Writer:
    """One file of known contents: name `tensors`, give their bytes to `write` in that order, then `finish`."""

    def __init__(self, out: BinaryIO, kv: Mapping[str, bytes], tensors: Sequence[Spec]):
        self._out, self._tensors, self._next = out, list(tensors), 0
        self._alignment = DEFAULT_ALIGNMENT
        if raw := kv.get("general.alignment"):
            self._alignment = int.from_bytes(raw[4:], "little")
        out.write(self._header(kv))

    def _header(self, kv: Mapping[str, bytes]) -> bytes:
        parts = [b"GGUF", struct.pack("<IQQ", VERSION, len(self._tensors), len(kv))]
        for key, value in kv.items():
            parts += [_name(key), value]
        at = 0
        for t in self._tensors:
            parts += [_name(t.name), struct.pack(f"<I{len(t.ne)}QIQ", len(t.ne), *t.ne, t.type.id, at)]
            at += self._padded(t.nbytes)
        header = b"".join(parts)
        return header + bytes(self._padded(len(header)) - len(header))

    def _padded(self, n: int) -> int:
        return -(-n // self._alignment) * self._alignment

    def write(self, data: npt.NDArray[np.uint8]) -> None:
        """The bytes of the next tensor."""
        self.write_parts([data])

    def write_parts(self, parts: Iterable[npt.NDArray[np.uint8]]) -> None:
        """The bytes of the next tensor, piece by piece."""
        spec, n = self._tensors[self._next], 0
        for part in parts:
            self._out.write(np.ascontiguousarray(part).data)
            n += part.nbytes
        if n != spec.nbytes:
            raise ValueError(f"{spec.name} has {spec.nbytes} bytes, not {n}")
        self._out.write(bytes(self._padded(n) - n))
        self._next += 1

    def finish(self) -> None:
        if self._next != len(self._tensors):
            raise ValueError(f"{len(self._tensors) - self._next} tensors were never written")


def _name(text: str) -> bytes:
    raw = text.encode()
    if not 0 < len(raw) <= MAX_NAME:
        raise GGUFError(f"a name must have 1 to {MAX_NAME} bytes, {text[:40]!r} has {len(raw)}")
    return struct.pack("<Q", len(raw)) + raw


def spec(info: TensorInfo) -> Spec:
    return Spec(info.name, info.ne, info.type)


def copy(tensors: Iterable[TensorInfo], kv: Mapping[str, bytes], path: str | os.PathLike[str]) -> None:
    """A file with these key/values and the tensors of other files, byte for byte."""
    tensors = list(tensors)
    with replacing(path) as out:
        writer = Writer(out, kv, [spec(t) for t in tensors])
        for tensor in tensors:
            writer.write(tensor.data)
        writer.finish()


def part_path(prefix: str | os.PathLike[str], no: int, count: int) -> Path:
    """Where part `no` (from 0) of a set lies: prefix-00001-of-00003.gguf."""
    return Path(SPLIT_NAME.format(os.fspath(prefix), no + 1, count))


def part_kv(kv: Mapping[str, bytes], no: int, count: int, n_tensors: int) -> dict[str, bytes]:
    """The key/values of part `no` of a set: all of them in the first part, in the others only what ties them together."""
    tie = {"split.no": encode("UINT16", no), "split.count": encode("UINT16", count),
           "split.tensors.count": encode("INT32", n_tensors)}
    return {**(kv if no == 0 else {}), **tie}
