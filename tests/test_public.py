"""The public names, what importing them costs, and what the package installs."""
from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ggraph
from ggraph import errors

ROOT = Path(__file__).parents[1]
HEAVY = {"numba", "llvmlite", "jinja2", "tokenizers", "sentencepiece", "cupy", "gguf", "click", "rich"}


def _is_error(x: object) -> bool:
    return inspect.isclass(x) and issubclass(x, Exception)


def test_all_is_sorted_and_complete() -> None:
    assert ggraph.__all__ == sorted(ggraph.__all__)
    assert set(ggraph.__all__) >= {*ggraph._HOME, *dict(inspect.getmembers(errors, _is_error))}
    assert set(ggraph.__all__) <= set(dir(ggraph))


@pytest.mark.parametrize("name", ggraph.__all__)
def test_every_public_name_has_its_home(name: str) -> None:
    value = getattr(ggraph, name)
    assert vars(ggraph)[name] is value   # looked up once


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'ggraph' has no attribute 'Modle'"):
        _ = ggraph.Modle


def loaded_after(code: str) -> set[str]:
    code = f"import sys\n{code}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT).split())


def test_import_is_light() -> None:
    assert not loaded_after("import ggraph") & (HEAVY | {"numpy"})


def test_public_names_are_light() -> None:
    assert not loaded_after("import ggraph\nfor n in ggraph.__all__: getattr(ggraph, n)") & HEAVY


def test_the_wheel_holds_everything_below_ggraph(tmp_path: Path) -> None:
    """The links become ordinary folders, data files come along, and nothing lands beside ggraph/."""
    src = tmp_path / "src"
    src.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, src)
    for name in ("ggraph", "backends", "models", "tools"):
        shutil.copytree(ROOT / name, src / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-c", "from setuptools.build_meta import build_wheel; build_wheel('dist')"],
                   cwd=src, check=True, capture_output=True)
    wheel, = (src / "dist").glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == {os.path.relpath(os.path.join(folder, name), src)
                      for folder, _, names in os.walk(src / "ggraph", followlinks=True) for name in names}
