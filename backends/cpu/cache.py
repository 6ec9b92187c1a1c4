"""Compiled kernels on disk, so that a second process compiles nothing.

Comes in: a kernel's name and target. Goes out: object code, from the cache folder or freshly stored there.
Must not know: how kernels are compiled or run.

The folder's name is a hash of everything that decides the code: the sources of this backend, Numba, LLVM, the target.
Inside one folder a kernel's name therefore stands for exactly one object. Every file starts with its own digest, so a
torn or damaged one counts as missing. A folder that cannot be written is replaced by a private one for this process.
"""
from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import shutil
import tempfile
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from ggraph import env

from .targets import Target

_DIGEST = 32


@lru_cache(maxsize=1)
def _sources() -> bytes:
    digest = hashlib.sha256(f"numba {version('numba')} llvmlite {version('llvmlite')}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.digest()


@lru_cache(maxsize=16)
def _folder(root: Path, target: Target) -> Path:
    """The folder for `target`, made and writable; a private temporary one where that is impossible."""
    name = hashlib.sha256(_sources() + repr(tuple(target)).encode()).hexdigest()[:24]
    path = root / f"{target.lowering}-{name}"
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
    """Where the objects for `target` are kept; exists and can be written."""
    return _folder(env.cache_dir("cpu"), target)


def load(name: str, target: Target) -> bytes | None:
    """The object code of kernel `name`, or None when it is missing or damaged."""
    try:
        data = (folder(target) / f"{name}.o").read_bytes()
    except OSError:
        return None
    code = data[_DIGEST:]
    return code if hashlib.sha256(code).digest() == data[:_DIGEST] else None


def store(name: str, target: Target, code: bytes) -> None:
    """Keep object code. Whole or not at all, whatever other processes do; a full disk only costs the reuse."""
    where = folder(target)
    with contextlib.suppress(OSError):
        handle, temporary = tempfile.mkstemp(dir=where, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as f:
                f.write(hashlib.sha256(code).digest() + code)
            os.replace(temporary, where / f"{name}.o")
        except OSError:
            os.unlink(temporary)
