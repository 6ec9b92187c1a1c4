"""What the README shows works: commands have the flags that it names, its Python runs."""
from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from tests import tiny

tomllib = pytest.importorskip("tomllib")        # Python 3.11
pytest.importorskip("fastapi")                  # of ggraph-server

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
COMMANDS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def command(name: str) -> click.Command:
    module, _, attribute = COMMANDS[name].partition(":")
    found: Any = getattr(importlib.import_module(module), attribute)
    assert isinstance(found, click.Command), name
    return found


def options(name: str) -> set[str]:
    return {o for p in command(name).params for o in (*p.opts, *p.secondary_opts)} | {"--help"}


def calls() -> Iterator[tuple[str, list[str]]]:
    """(command, words) of each call of one of ours in the shell blocks."""
    for kind, block in BLOCKS:
        for line in block.splitlines() if kind == "sh" else ():
            words = shlex.split(line, comments=True)
            while words:
                end = next((i for i, w in enumerate(words) if w in ("&&", "|")), len(words))
                if words[0].startswith("ggraph-"):
                    yield words[0], words[1:end]
                words = words[end + 1:]


@pytest.mark.parametrize(("name", "words"), list(calls()), ids=lambda x: x if isinstance(x, str) else " ".join(x))
def test_a_command_takes_what_is_shown(name: str, words: list[str]) -> None:
    given = {w for w in words if re.fullmatch(r"-{1,2}[a-zA-Z][\w-]*", w)}
    assert name in COMMANDS and (name == "ggraph-eval" or given <= options(name)), sorted(given - options(name))


def test_flags_in_the_text_are_flags_of_a_command() -> None:
    known = {o for name in COMMANDS if name != "ggraph-eval" for o in options(name)}
    text = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    named = {w for quoted in re.findall(r"`([^`\n]+)`", text) for w in quoted.split() if w.startswith("--")}
    assert named and named - {"--gguf", "--gguf-base"} <= known, sorted(named - known)      # those are pytest's


def test_every_command_and_file_is_there() -> None:
    assert set(re.findall(r"ggraph-(?!runtime)[a-z]+", README)) == set(COMMANDS)
    for path in re.findall(r"\]\((docs/[^)]+)\)|\b((?:docs|scripts)/[\w.-]+)", README):
        assert (ROOT / (path[0] or path[1])).exists(), path


def test_its_python_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tiny.write(tmp_path / "tiny.gguf")
    names: dict[str, Any] = {}
    own = [compile(code.replace('"smollm2"', repr(str(file))), "README.md", "exec") for kind, code in BLOCKS if kind == "python"]
    for code in own:
        if "ggraph" in code.co_names and "openai" not in code.co_names:
            exec(code, names)
    names["llm"].close()
    names["model"].close()
    assert f"(2, {tiny.N_EMBD})" in capsys.readouterr().out
