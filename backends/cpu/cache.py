"""Compiled kernels on disk, so that a second process compiles nothing.

Comes in: a kernel's name, module and target. Goes out: object code, from the cache folder or freshly stored there.
Must not know: how kernels are compiled or run.

There is a folder per target and version of Numba and LLVM. A file's name holds a hash of the sources that decide the
kernel: its module, what that imports of ggraph, directly or not, and the modules that every kernel is made with. Thus a
kernel may use only what its module imports. Every file starts with the digest of its content, so a torn or damaged one
counts as missing. A folder that cannot be written is replaced by a private one for this process.
"""
from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import re
import shutil
import sys
import tempfile
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from ggraph import env

from .targets import Target

_DIGEST = 32
_ROOT = env.__name__.partition(".")[0]
_ALWAYS = tuple(f"{__package__}.{name}" for name in ("kernel", "simd", "vmath", "atomic", "tile"))
_IMPORT = re.compile(rb"^[ \t]*from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)", re.MULTILINE)


@lru_cache(maxsize=256)
def _path(module: str) -> Path | None:
    """Where a module's source is; None if there is no such module (`from .module import function` asks for one)."""
    root, *parts = module.split(".")
    if root != _ROOT:
        return Path(str(sys.modules[module].__file__))
    path = Path(env.__file__).parent.joinpath(*parts)               # not through the module: it may wait to be loaded
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


@lru_cache(maxsize=256)
def _source(module: str) -> bytes:
    path = _path(module)
    return path.read_bytes() if path else b""


def _imports(module: str) -> set[str]:
    """Modules of ggraph that a module names in its imports."""
    found = set()
    for dots, name, names in _IMPORT.findall(_source(module)):
        base = module.rsplit(".", len(dots))[0] if dots else ""
        base = ".".join(filter(None, (base, name.decode())))
        found |= {base, *(f"{base}.{n}" for n in re.findall(r"(\w+)(?:[ \t]+as[ \t]+\w+)?", names.decode()))}
    return {m for m in found if m.startswith(f"{_ROOT}.") and m != __package__ and _path(m)}


@lru_cache(maxsize=64)
def sources(module: str) -> frozenset[str]:
    """All modules whose source decides the kernels of a module."""
    known: set[str] = set()
    todo = {module, *_ALWAYS}
    while todo:
        known |= todo
        todo = set().union(*map(_imports, todo)) - known
    return frozenset(known)


@lru_cache(maxsize=64)
def _key(module: str) -> str:
    digest = hashlib.sha256()
    for name in sorted(sources(module)):
        digest.update(name.encode() + b"\0" + _source(name))
    return digest.hexdigest()[:16]


@lru_cache(maxsize=16)
def _folder(root: Path, target: Target) -> Path:
    """The folder for `target`, made and writable; a private temporary one where that is impossible."""
    made_with = f"{version('numba')} {version('llvmlite')} {tuple(target)}"
    path = root / f"{target.lowering}-{hashlib.sha256(made_with.encode()).hexdigest()[:16]}"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as e:
        private = Path(tempfile.mkdtemp(prefix="ggraph-"))
        atexit.register(shutil.rmtree, private, ignore_errors=True)
        env.log(f"cannot write {path} ({e.strerror}): kernels are compiled anew in every process; "
                "set GGRAPH_CACHE to a folder you can write")
        return private


def folder(target: Target) -> Path:
    """Where objects for a target are kept; exists and can be written."""
    return _folder(env.cache_dir("cpu"), target)


def file(name: str, module: str, target: Target) -> Path:
    """Where the object of a kernel is kept."""
    return folder(target) / f"{name}-{_key(module)}.o"


def load(path: Path) -> bytes | None:
    """The object code in a file, or None when it is missing or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    code = data[_DIGEST:]
    return code if hashlib.sha256(code).digest() == data[:_DIGEST] else None


def store(path: Path, code: bytes) -> None:
    """Keep object code. Whole or not at all, whatever other processes do; a full disk only costs the reuse."""
    with contextlib.suppress(OSError):
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as f:
                f.write(hashlib.sha256(code).digest() + code)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
