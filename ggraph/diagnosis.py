"""What this installation can do: Python, memory, cache folders, packages, and what each backend says of itself.

In: nothing. Out: `Finding`s, in the order of a report; what is broken says how to mend it. It opens no model. A backend takes part
by a module `diagnosis` of its own, with a function `diagnose`.
"""
from __future__ import annotations

import importlib
import os
import pkgutil
import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata

from . import env
from .backend import Finding
from .errors import Error

PACKAGE = "ggraph-runtime"
OLDEST = (3, 10)
NAME = re.compile(r"[A-Za-z0-9._-]+")
EXTRA = re.compile(r"extra\s*==\s*['\"]([\w-]+)")


def diagnose() -> list[Finding]:
    """Everything that is known; nothing is raised."""
    return [*_system(), *_cache(), *_packages(), *_backends()]


def _system() -> Iterator[Finding]:
    version = platform.python_version()
    old = sys.version_info < OLDEST
    yield Finding("system", "Python", f"{version} on {platform.platform(terse=True)}", "broken" if old else "ok",
                  "install Python 3.10 or newer" if old else "")
    yield Finding("system", "cores", str(os.cpu_count() or 1))
    yield Finding("system", "free memory", f"{env.free_memory() / 2**30:.1f} GiB")
    for var in env.TABLE:
        if os.environ.get(var.name):
            yield _variable(var.name)


def _variable(name: str) -> Finding:
    try:
        return Finding("system", name, env.get(name))
    except Error as e:
        return Finding("system", name, str(e), "broken", f"unset {name}")


def _cache() -> Iterator[Finding]:
    """The cache folder, and how large each folder in it is."""
    folder = env.cache_dir()
    try:
        env.make_cache_dir()
    except Error as e:
        reason, _, remedy = str(e).partition("; ")
        yield Finding("cache", str(folder), reason, "broken", remedy)
        return
    for path in sorted(p for p in folder.iterdir() if p.is_dir()):
        writable = os.access(path, os.W_OK | os.X_OK)
        yield Finding("cache", str(path), f"{_nbytes(path) / 2**20:.1f} MiB" if writable else "is read-only",
                      "ok" if writable else "broken", "" if writable else f"chmod -R u+rwX '{path}'")
    yield Finding("cache", str(folder), "writable")


def _nbytes(folder: os.PathLike[str]) -> int:
    return sum(os.lstat(os.path.join(where, name)).st_size for where, _, names in os.walk(folder) for name in names)


def _packages() -> Iterator[Finding]:
    """What ggraph needs, then its extras: an extra that is not there breaks nothing."""
    try:
        wanted = metadata.requires(PACKAGE) or []
        yield Finding("packages", PACKAGE, metadata.version(PACKAGE))
    except metadata.PackageNotFoundError:
        yield Finding("packages", PACKAGE, "is not installed, so its packages are not known", "missing", "pip install .")
        return
    extras: dict[str, list[str]] = {}
    for line in wanted:
        name, condition = NAME.match(line), EXTRA.search(line)
        if name and name[0] != PACKAGE:
            extras.setdefault(condition[1] if condition else "", []).append(name[0])
    for extra, names in sorted(extras.items()):
        absent = [n for n in names if version(n) is None]
        where = f"extra {extra}" if extra else "required"
        if absent:
            yield Finding("packages", where, f"without {', '.join(absent)}", "missing" if extra else "broken",
                          f"pip install '{PACKAGE}[{extra}]'" if extra else f"pip install {' '.join(absent)}")
        else:
            yield Finding("packages", where, ", ".join(f"{n} {version(n)}" for n in names))


def version(name: str) -> str | None:
    """Of an installed package; None where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _backends() -> Iterator[Finding]:
    folder = importlib.import_module(f"{__package__}.backends")
    for found in pkgutil.iter_modules(folder.__path__):
        name = f"{folder.__name__}.{found.name}.diagnosis"
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as e:
            if e.name != name:
                yield Finding(found.name, "import", f"the backend cannot be loaded: {e}", "broken", f"pip install {e.name}")
        except Exception as e:
            yield Finding(found.name, "import", f"the backend cannot be loaded: {e}", "broken",
                          "pip install --force-reinstall numba llvmlite numpy")
        else:
            yield from module.diagnose()
