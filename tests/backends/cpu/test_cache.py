"""The compile cache: a second process compiles nothing; damage and unwritable folders cost time, never answers."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ggraph import dtypes
from ggraph.backends.cpu import cache, executor, kernel, matmul, matmul_id, prepare, repack, targets

SCRIPT = """
import sys
from ggraph import dtypes
from ggraph.backends.cpu import executor, matmul_id, prepare, repack
seen = []
kernels = [matmul_id.group_kernel, repack.repack_kernel(dtypes.F32), executor.execute, executor.work]
print(prepare.compile_all(kernels, lambda done, total: seen.append((done, total))), seen, 'numba' in sys.modules)
"""


def _start(folder: Path, **env: str) -> tuple[str, str]:
    """(what the script prints, its standard error) in a fresh process."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], env={**os.environ, "GGRAPH_CACHE": str(folder), **env},
                          capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    return done.stdout.strip(), done.stderr


def _files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_second_process_compiles_nothing_and_needs_no_numba(tmp_path: Path) -> None:
    first, _ = _start(tmp_path)
    files = _files(tmp_path)
    assert first == "4 [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)] True"
    assert len(files) == 4 and {path.suffix for path in files} == {".o"}
    second, _ = _start(tmp_path)
    assert second == "0 [] False"
    assert _files(tmp_path) == files


def test_a_damaged_file_is_compiled_again(tmp_path: Path) -> None:
    _start(tmp_path)
    damaged, cut, *_ = sorted(_files(tmp_path))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    cut.write_bytes(cut.read_bytes()[:100])
    assert _start(tmp_path)[0].startswith("2 ")
    assert _start(tmp_path)[0].startswith("0 ")


def test_a_folder_that_cannot_be_written_is_replaced_and_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    out, err = _start(blocked)
    assert out.startswith("4 ")
    assert str(blocked) in err and "GGRAPH_CACHE" in err and err.count("\n") == 1
    assert _files(tmp_path) == {blocked: blocked.stat().st_mtime_ns}


def test_every_target_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGRAPH_CACHE", str(tmp_path))
    files = {cache.file("k", matmul.__name__, target) for target in targets.LEAST.values()}
    assert len({file.parent for file in files}) == len(targets.LEAST)


def test_a_kernel_is_made_of_its_module_and_all_that_this_imports() -> None:
    names = {name.removeprefix("ggraph.").removeprefix("backends.cpu.") for name in cache.sources(matmul.__name__)}
    assert {"matmul", "formats", "format_k", "repack", "dtypes", "simd", "vector", "targets", "control"} <= names
    assert not {"pool", "executor", "lower"} & names
    assert executor.__name__ in cache.sources(executor.__name__) - cache.sources(matmul.__name__)


def test_a_change_of_a_source_renames_the_kernels_made_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def names() -> list[str]:
        cache._key.cache_clear()
        return [cache.file("k", m.__name__, targets.current()).name for m in (matmul, executor)]
    before, source = names(), cache._source
    monkeypatch.setattr(cache, "_source", lambda m: source(m) + (b"#" if m.endswith(".format_k") else b""))
    changed = names()
    assert changed[0] != before[0] and changed[1] == before[1]
    monkeypatch.undo()
    assert names() == before


def test_a_helper_stores_what_it_is_told_and_nobody_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGRAPH_CACHE", str(tmp_path))
    chosen = [executor.clock, matmul_id.group_kernel, repack.repack_kernel(dtypes.F32)]
    jobs = json.dumps([(k.module, k.attribute, k.args) for k in chosen])
    prepare.work(jobs)
    files = _files(tmp_path)
    assert {path.name.rpartition("-")[0] for path in files} == {k.name for k in chosen}
    prepare.work(jobs)
    assert _files(tmp_path) == files


def test_kernels_of_one_template_are_made_once() -> None:
    assert matmul.matmul_kernel(dtypes.Q4_0) is matmul.matmul_kernel(dtypes.Q4_0)
    assert matmul.matmul_kernel(dtypes.Q4_0).name != matmul.matmul_kernel(dtypes.Q4_1).name


def test_a_kernel_that_calls_python_is_refused() -> None:
    def prints(p, ith, nth):                                                    # type: ignore[no-untyped-def]
        print(p)
    with pytest.raises(AssertionError, match="calls Python"):
        kernel.kernel(prints).assembly(targets.current())
