"""Makes GGUF files out of GGUF files: other key/values, other tensor names, parts of a set, one file out of a set.

In: an open file. Out: new files under their names, whole or not at all. Tensors are copied byte for byte, and key/values that
nobody changed as they stand.
"""
from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ggraph
from ggraph import gguf, writer

KINDS = {"u8": "UINT8", "i8": "INT8", "u16": "UINT16", "i16": "INT16", "u32": "UINT32", "i32": "INT32", "f32": "FLOAT32",
         "bool": "BOOL", "str": "STRING", "u64": "UINT64", "i64": "INT64", "f64": "FLOAT64", "float": "FLOAT32", "int": ""}
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


def value(file: gguf.File, typed: str, key: str) -> tuple[str, Any]:
    """What stands behind KEY= on a command line: TYPE:VALUE, TYPE[]:JSON, or a value alone where the file has the key."""
    name, colon, text = typed.partition(":")
    many, name = name.endswith("[]"), name.removesuffix("[]")
    if not colon or name not in KINDS:
        if key not in file.kv:
            raise ggraph.GGUFError(f"{key} is a new key: say its type, as in {key}=u32:1; types: {', '.join(KINDS)}")
        kind, text, many = file.kv.kind(key), typed, file.kv.kind(key).startswith("ARRAY")
        kind = kind.removeprefix("ARRAY:")
    else:
        kind = KINDS[name] or _integer(file, key)
    try:
        return (f"ARRAY:{kind}", list(json.loads(text))) if many else (kind, _parse(kind, text))
    except (ValueError, KeyError, TypeError):
        raise ggraph.GGUFError(f"{key}: {text[:60]!r} is not {'JSON with values' if many else 'a value'} of type {kind}") from None


def _integer(file: gguf.File, key: str) -> str:
    kind = file.kv.kind(key) if key in file.kv else "UINT32"
    return kind if "INT" in kind and ":" not in kind else "UINT32"


def _parse(kind: str, text: str) -> Any:
    if kind == "STRING":
        return text
    if kind == "BOOL":
        return _TRUTH[text.lower()]
    return float(text) if kind.startswith("FLOAT") else int(text)


def edit(path: str | Path, target: str | Path, put: Mapping[str, tuple[str, Any]] | None = None, remove: Iterable[str] = (),
         rename: Mapping[str, str] | None = None) -> None:
    """A copy with key/values put (key -> (kind, value)) or removed, and tensors renamed. `target` may be `path` itself."""
    put, rename = dict(put or {}), dict(rename or {})
    with gguf.File(path) as file:
        kv = writer.raw_kv(file)
        if missing := [key for key in remove if key not in kv]:
            raise ggraph.GGUFError(f"{path} has no key {missing[0]!r}")
        if missing := [name for name in rename if name not in file.tensors]:
            raise ggraph.GGUFError(f"{path} has no tensor {missing[0]!r}")
        kv = {key: raw for key, raw in kv.items() if key not in set(remove)}
        kv |= {key: writer.encode(kind, value) for key, (kind, value) in put.items()}
        tensors = list(file.tensors.values())
        names = [rename.get(t.name, t.name) for t in tensors]
        if len(set(names)) < len(names):
            raise ggraph.GGUFError(f"two tensors would be called {next(n for n in names if names.count(n) > 1)!r}")
        with writer.replacing(target) as out:
            made = writer.Writer(out, kv, [writer.Spec(name, t.ne, t.type) for name, t in zip(names, tensors)])
            for tensor in tensors:
                made.write(tensor.data)
            made.finish()


def merge(path: str | Path, target: str | Path) -> None:
    """One file with what the parts of a set hold; `path` is any part."""
    edit(path, target)


def split(path: str | Path, prefix: str | Path, max_bytes: int = 0, max_tensors: int = 0, progress: Any = None) -> list[Path]:
    """A set of parts PREFIX-00001-of-0000N.gguf, each with at most that many bytes of tensors (but at least one tensor)."""
    with gguf.File(path) as file:
        parts = _parts(list(file.tensors.values()), max_bytes, max_tensors)
        if len(parts) > gguf.MAX_SPLIT:
            raise ggraph.GGUFError(f"that would be {len(parts)} files; at most {gguf.MAX_SPLIT} make a set")
        paths = [writer.part_path(prefix, no, len(parts)) for no in range(len(parts))]
        if taken := [p for p in paths if p.exists()]:
            raise ggraph.GGUFError(f"{taken[0]} is there already: give another -o, or remove it")
        kv, done = writer.raw_kv(file), 0
        with ExitStack() as stack:          # all parts take their names at the end, or none
            for no, (part, target) in enumerate(zip(parts, paths)):
                out = stack.enter_context(writer.replacing(target))
                made = writer.Writer(out, writer.part_kv(kv, no, len(parts), len(file.tensors)), [writer.spec(t) for t in part])
                for tensor in part:
                    made.write(tensor.data)
                    done += 1
                    if progress:
                        progress("write", done, len(file.tensors))
                made.finish()
    return paths


def _parts(tensors: Sequence[gguf.TensorInfo], max_bytes: int, max_tensors: int) -> list[list[gguf.TensorInfo]]:
    parts: list[list[gguf.TensorInfo]] = [[]]
    size = 0
    for tensor in tensors:
        full = (max_tensors and len(parts[-1]) >= max_tensors) or (max_bytes and size + tensor.nbytes > max_bytes)
        if parts[-1] and full:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += tensor.nbytes
    return parts
