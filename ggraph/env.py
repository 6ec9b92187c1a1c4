"""Every environment variable of ggraph in one table, the cache folder, and the one-line log.

Comes in: `os.environ`, read at each call. Goes out: checked values, folders, lines on standard error.
Must not know: models, graphs, backends. No other module reads GGRAPH_* itself.
`python -m ggraph.env` prints docs/environment.md.
"""
from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

from ggraph.errors import Error


class Var(NamedTuple):
    """`choices` are the accepted values; none given means free text. Unset or empty means `default`."""
    name: str
    choices: tuple[str, ...]
    default: str
    help: str


TABLE = (
    Var("GGRAPH_BACKEND", ("ref", "cpu", "cuda"), "", "Run everything on this backend. Unset: the best that opens."),
    Var("GGRAPH_REF", ("ggml", "exact"), "ggml", "What `ref` multiplies F16, BF16 and quantized weights with: activations "
        "rounded as ggml rounds them, or as they are. `exact` is the yardstick for accuracy."),
    Var("GGRAPH_CPU", ("generic", "avx2", "avxvnni", "avx512vnni", "neon"), "",
        "Compile CPU kernels with this set of vector instructions. Unset: the host's best."),
    Var("GGRAPH_CUDA_DEVICE", ("gpu", "emulator"), "gpu", "What the CUDA backend runs on. The emulator computes on the host, "
        "very slowly: it is there to test kernels without a GPU."),
    Var("GGRAPH_CUDA_GRAPH", ("0", "1"), "1", "0: every kernel is launched by itself, none is captured and replayed."),
    Var("GGRAPH_CACHE", (), "", "Folder for fetched models and compiled kernels. "
        "Unset: `$XDG_CACHE_HOME/ggraph`, `~/Library/Caches/ggraph` on macOS, `%LOCALAPPDATA%\\ggraph` on Windows."),
    Var("GGRAPH_DEBUG", ("0", "1", "2", "3", "4"), "0", "How much to show on standard error, each level with those "
        "below it: 1 load and devices, 2 time and GB/s of each node, 3 graph and splits, 4 values. "
        "From 1 on, commands also print tracebacks."),
    Var("GGRAPH_GOLDENS", (), "", "Folder with the full set of golden files; `scripts/test` checks them as well."),
)
_VARS = {var.name: var for var in TABLE}
_quiet = False


def get(name: str) -> str:
    """The value of a variable of the table, or its default. `Error` when it is none of the choices."""
    var = _VARS[name]
    value = os.environ.get(name) or var.default
    if value != var.default and var.choices and value not in var.choices:
        raise Error(f"{name}={value} is not known; use one of {', '.join(var.choices)}")
    return value


def debug() -> int:
    """The level of GGRAPH_DEBUG, 0 to 4."""
    return int(get("GGRAPH_DEBUG"))


def set_debug(level: int) -> None:
    """As if GGRAPH_DEBUG were this, unless it is set."""
    os.environ.setdefault("GGRAPH_DEBUG", str(level))


def cache_dir(*parts: str) -> Path:
    """A folder below the cache folder; it need not exist."""
    chosen = get("GGRAPH_CACHE")
    return (Path(chosen).expanduser() if chosen else _user_cache() / "ggraph").joinpath(*parts)


def make_cache_dir(*parts: str) -> Path:
    """The same, made where missing. `Error` where it cannot be made or written."""
    path = cache_dir(*parts)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise Error(f"cannot make the cache folder {path} ({e.strerror}); set GGRAPH_CACHE to one you can write") from e
    if not os.access(path, os.W_OK | os.X_OK):
        raise Error(f"the cache folder {path} is read-only; set GGRAPH_CACHE to one you can write")
    return path


def _user_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def free_memory() -> int:
    """Bytes of memory that are available; where the system does not tell, all of it, or 8 GiB."""
    try:
        with open("/proc/meminfo") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 8 << 30


def set_quiet(quiet: bool) -> None:
    """Silence `log` at level 0 (`-q`); what GGRAPH_DEBUG asks for is still shown."""
    global _quiet
    _quiet = quiet


def log(message: str, level: int = 0) -> None:
    """One line on standard error: level 0 unless quiet, above that when GGRAPH_DEBUG reaches the level."""
    if sys.stderr is not None and ((debug() >= level) if level else not _quiet):
        sys.stderr.write(f"ggraph: {message}\n")
        sys.stderr.flush()


def markdown() -> str:
    """docs/environment.md."""
    rows = [f"| `{v.name}` | {', '.join(f'`{c}`' for c in v.choices) or 'a folder'} | {v.help} |" for v in TABLE]
    intro = "Made from the table in `ggraph/env.py` by `python -m ggraph.env`."
    head = ["# Environment variables", "", intro, "", "| variable | values | meaning |", "|---|---|---|"]
    return "\n".join([*head, *rows, ""])


if __name__ == "__main__":
    sys.stdout.write(markdown())
