from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from ggraph import env
from ggraph.errors import Error

ROOT = Path(__file__).parents[1]


def test_docs_are_the_table() -> None:
    assert (ROOT / "docs/environment.md").read_text() == env.markdown(), \
        "run: python -m ggraph.env > docs/environment.md"


def test_every_variable_named_in_the_source_is_in_the_table() -> None:
    names = {v.name for v in env.TABLE}
    for folder in ("ggraph", "backends", "models", "tools", "scripts"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix == ".py" or path.parent.name == "scripts":
                assert set(re.findall(r"\bGGRAPH_[A-Z0-9_]+", path.read_text())) <= names, path


def test_only_env_reads_the_variables() -> None:
    for folder in ("ggraph", "backends", "models", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name != "env.py":
                assert not re.search(r"os\.(environ|getenv).*GGRAPH_", path.read_text()), path


def test_get(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GGRAPH_BACKEND", raising=False)
    assert env.get("GGRAPH_BACKEND") == ""
    monkeypatch.setenv("GGRAPH_BACKEND", "ref")
    assert env.get("GGRAPH_BACKEND") == "ref"
    monkeypatch.setenv("GGRAPH_BACKEND", "tpu")
    with pytest.raises(Error, match="GGRAPH_BACKEND=tpu is not known; use one of ref, cpu, cuda"):
        env.get("GGRAPH_BACKEND")


@pytest.mark.parametrize(("value", "level"), [(None, 0), ("", 0), ("3", 3)])
def test_debug(monkeypatch: pytest.MonkeyPatch, value: str | None, level: int) -> None:
    monkeypatch.delenv("GGRAPH_DEBUG", raising=False)
    if value is not None:
        monkeypatch.setenv("GGRAPH_DEBUG", value)
    assert env.debug() == level


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GGRAPH_CACHE", str(tmp_path / "c"))
    assert env.cache_dir("models") == tmp_path / "c" / "models"
    assert env.make_cache_dir("models").is_dir()
    monkeypatch.delenv("GGRAPH_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert env.cache_dir() == tmp_path / "ggraph"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert env.cache_dir() == tmp_path / ".cache" / "ggraph"


def test_unwritable_cache_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GGRAPH_CACHE", str(tmp_path / "file"))
    with pytest.raises(Error, match="set GGRAPH_CACHE to one you can write"):
        env.make_cache_dir("models")
    monkeypatch.setenv("GGRAPH_CACHE", str(tmp_path / "ok"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(Error, match="read-only"):
        env.make_cache_dir()


def test_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GGRAPH_DEBUG", "1")
    env.log("shown")
    env.log("also shown", level=1)
    env.log("too deep", level=2)
    env.set_quiet(True)
    try:
        env.log("silenced")
        env.log("asked for", level=1)
    finally:
        env.set_quiet(False)
    assert capsys.readouterr().err == "ggraph: shown\nggraph: also shown\nggraph: asked for\n"


def test_without_a_standard_error_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    env.log("said to nobody")
