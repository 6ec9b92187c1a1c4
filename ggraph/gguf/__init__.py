"""Reads GGUF files: key/values and the tensor directory, through mmap. Reading order: source, header, this file.

In: the path of a file, or of any part of a split set. Out: `File` with `kv` (a mapping that decodes large values
on first access) and `tensors` (name -> TensorInfo, whose `data` are the mapped bytes). Anything malformed is a
GGUFError. It must not know architectures, tokenizers or maths: only bytes, names, shapes and types.
Layout of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""
from __future__ import annotations

import os
from types import TracebackType

from ggraph.errors import GGUFError, Single, file_path

from .header import DEFAULT_ALIGNMENT, KV, MAX_SPLIT, SPLIT_NAME, Fault, Shard, TensorInfo
from .source import ARRAY, MAX_NAME, NUMPY, SCALARS, STRING

__all__ = ["ARRAY", "DEFAULT_ALIGNMENT", "KV", "MAX_NAME", "MAX_SPLIT", "NUMPY", "SCALARS", "SPLIT_NAME", "STRING",
           "Fault", "File", "TensorInfo"]


class File(Single):
    """A GGUF file, or a whole split set opened through any of its parts. A context manager.

    `kv` and `version`, `alignment` are those of the first part; `tensors` has those of all parts in file order;
    `size` is the bytes of all parts. Raises GGUFError when anything is missing or malformed. With a list for `faults`, what
    is wrong with single tensors (there twice, cut short, overlapping) goes there instead: of two, the first is in `tensors`
    and the other in `twice`, and `data` of what is cut short has only the bytes that are there.
    """

    def __init__(self, path: str | os.PathLike[str], faults: list[Fault] | None = None):
        self.path, self._faults = file_path("the path of the GGUF file", path), faults
        self._shards = [Shard(self.path, faults)]
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
                self._shards.insert(i, Shard(path, self._faults))
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
