"""What holds for the command lines of all tools: misspelt names, standard input and output in the place of files, JSON."""
from __future__ import annotations

import importlib
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ggraph.tools._output import check_target, write_text

pytest.importorskip("fastapi")                  # of ggraph-server
TOOLS = ("run", "bench", "server", "inspection", "check", "tracing", "quantize", "imatrix", "perplexity", "diff", "report",
         "doctor")


def command(tool: str) -> click.Command:
    found = importlib.import_module(f"ggraph.tools.{tool}").main
    assert isinstance(found, click.Command)
    return found


def options(tool: str) -> list[click.Option]:
    return [p for p in command(tool).params if isinstance(p, click.Option)]


@pytest.mark.parametrize("tool", TOOLS)
def test_letters_that_are_no_name_are_not_taken_apart(tool: str) -> None:
    """-hf is neither -h nor -h -f, and -mzz no model zz."""
    names = {name for o in options(tool) for name in (*o.opts, *o.secondary_opts)}
    letters = [name for name in names if re.fullmatch("-[a-zA-Z]", name)]
    for word in [f"{name}zz" for name in (*letters, "-h")] + ["-hf"]:
        result = CliRunner().invoke(command(tool), [word, "value"])
        assert result.exit_code == 2 and f"No such option '{word}'" in result.output, result.output


def test_a_number_may_stand_at_once() -> None:
    for word, said in ("-n5", "no file nonesuch"), ("-n-1", "no file nonesuch"), ("-n-9", "-9 is not in the range"):
        result = CliRunner().invoke(command("run"), ["-m", "nonesuch", word, "text"])
        assert said in result.output, result.output


def test_what_is_meant_is_told() -> None:
    assert "'-ngl'" in CliRunner().invoke(command("run"), ["-nlg", "3", "text"]).output


@pytest.mark.parametrize("tool", TOOLS)
def test_a_text_may_come_from_standard_input(tool: str) -> None:
    texts = [o for o in options(tool) if "--file" in o.opts]
    assert all(isinstance(o.type, click.Path) and o.type.allow_dash and "standard input" in (o.help or "") for o in texts)
    assert bool(texts) == (tool in ("run", "imatrix", "perplexity", "diff"))


@pytest.mark.parametrize("tool", TOOLS)
def test_every_result_may_be_json(tool: str) -> None:
    assert tool == "server" or any("--json" in o.opts for o in options(tool))


def test_a_page_may_go_to_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_target("-")
    write_text(Path("-"), "page")
    assert capsys.readouterr().out == "page\n" and not list(tmp_path.iterdir())
