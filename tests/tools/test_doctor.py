"""ggraph-doctor: what it finds on this machine, and its exit code where something that is used is broken."""
from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner

import ggraph
from ggraph import diagnosis
from ggraph.backend import Finding
from ggraph.tools.doctor import main

BROKEN = Finding("cuda", "CuPy", "2 CuPy wheels are installed at once", "broken", "pip uninstall -y cupy-cuda12x cupy-cuda13x")


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GGRAPH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("GGRAPH_BACKEND", raising=False)


def names(findings: list[Finding]) -> set[tuple[str, str]]:
    return {(f.part, f.name) for f in findings}


def test_it_tells_what_is_here(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, [])
    for words in ("Python: 3.", "cores: ", "free memory: ", "Numba ", "LLVM ", "lowering: ", f"{tmp_path / 'cache'}: writable",
                  "NVRTC"):
        assert words in done.output
    assert done.exit_code == ("FAIL" in done.output), done.output


def test_json() -> None:
    done = CliRunner().invoke(main, ["--json"])
    told = json.loads(done.output)
    assert told["ok"] == (done.exit_code == 0)
    assert {"part", "name", "value", "state", "remedy"} == set(told["findings"][0])
    assert {"system", "cache", "cpu", "cuda"} <= {f["part"] for f in told["findings"]}


def test_what_is_broken_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggraph, "diagnose", lambda: [Finding("system", "cores", "2"), BROKEN])
    done = CliRunner().invoke(main, [])
    assert done.exit_code == 1 and "[FAIL] CuPy: 2 CuPy wheels" in done.output
    assert "-> pip uninstall -y cupy-cuda12x cupy-cuda13x" in done.output and "1 broken" in done.output


def test_what_nothing_uses_is_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggraph, "diagnose", lambda: [BROKEN._replace(state="missing")])
    done = CliRunner().invoke(main, [])
    assert done.exit_code == 0 and "all that is used works" in done.output


def test_a_cache_folder_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GGRAPH_CACHE", str(tmp_path / "file" / "cache"))
    found, = diagnosis._cache()
    assert found.state == "broken" and "cannot make the cache folder" in found.value and "set GGRAPH_CACHE" in found.remedy


def test_a_folder_of_the_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("cpu", "cuda"):
        (tmp_path / "cache" / name).mkdir(parents=True)
    (tmp_path / "cache/cpu/kernel").write_bytes(bytes(3 << 20))
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "cuda" and access(path, mode))
    cpu, cuda, whole = diagnosis._cache()
    assert cpu.value == "3.0 MiB" and whole.state == "ok"
    assert cuda.state == "broken" and cuda.remedy == f"chmod -R u+rwX '{tmp_path / 'cache/cuda'}'"


def test_variables_that_are_set_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGRAPH_CPU", "fast")
    found = [f for f in ggraph.diagnose() if f.name in ("GGRAPH_CPU", "lowering")]
    assert [f.state for f in found] == ["broken", "broken"] and found[0].remedy == "unset GGRAPH_CPU"


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: ["numpy>=1.26", "no-such-thing>=1", 'rich>=13; extra == "hub"',
                                                            'no-other-thing; extra == "report"'])
    monkeypatch.setattr(diagnosis, "version", lambda name: None if name.startswith("no-") else "1.0")
    found = {f.name: f for f in diagnosis._packages()}
    assert found["required"].state == "broken" and found["required"].remedy == "pip install no-such-thing"
    assert found["extra hub"].state == "ok" and found["extra report"].state == "missing"
    assert found["extra report"].remedy == "pip install 'ggraph-runtime[report]'"


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> Iterator[str]:
        raise metadata.PackageNotFoundError(name)
    monkeypatch.setattr(metadata, "requires", unknown)
    found, = diagnosis._packages()
    assert found.state == "missing" and found.remedy == "pip install ."


def test_a_backend_that_cannot_be_loaded_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> object:
        if name.endswith("cpu.diagnosis"):
            raise ImportError("numba wants another NumPy")
        return original(name)
    original = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", load)
    found = [f for f in diagnosis._backends() if f.part == "cpu"]
    assert found[0].state == "broken" and "numba wants another NumPy" in found[0].value and "force-reinstall" in found[0].remedy
