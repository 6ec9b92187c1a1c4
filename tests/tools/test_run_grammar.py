"""ggraph-run: text in the form that was asked for."""
from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ggraph.tools.run import main
from tests import tiny

pytest.importorskip("llguidance")
SCHEMA = '{"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": false}'


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write(tmp_path_factory.mktemp("run") / "tiny.gguf"))


def run(file: str, *args: str, text: str | None = None, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["-q", "-m", file, "-c", "256", "-n", "60", *args], input=text)
    assert result.exit_code == code, result.output
    return result


def test_a_grammar(file: str, tmp_path: Path) -> None:
    assert run(file, "say ", "--grammar", 'root ::= "on" | "off"').stdout in ("say on\n", "say off\n")
    (tmp_path / "g.gbnf").write_text("root ::= [0-9] [0-9]\n")
    assert re.fullmatch(r"say \d\d\n", run(file, "say ", "--grammar-file", str(tmp_path / "g.gbnf")).stdout)


def test_a_schema(file: str, tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(SCHEMA)
    for given in ("-j", SCHEMA), ("--json-schema-file", str(tmp_path / "s.json")), ("-jf", str(tmp_path / "s.json")):
        text = run(file, "say", *given, "--no-display-prompt").stdout
        assert json.loads(text)["a"] in ("x", "y")


def test_every_answer_of_a_chat_has_the_form(file: str) -> None:
    out = run(file, "--grammar", 'root ::= "on" | "off"', text="a\nb\nc\n").stdout
    assert len(re.findall("on|off", out)) == 3 and not re.sub(r"on|off|\s|>", "", out)


@pytest.mark.parametrize(("args", "code", "said"), [
    (["-j", "{"], 1, "the JSON schema is no JSON"), (["-j", "3"], 1, "it must be a JSON schema"),
    (["--grammar", "root = x"], 1, "failed to parse grammar"), (["--grammar", ""], 1, "No 'root' rule"),
    (["--grammar", 'root ::= "a"', "-j", "{}"], 2, "give only one of --grammar"),
    (["--grammar-file", "nonesuch"], 2, "does not exist")])
def test_what_is_no_form(file: str, args: list[str], code: int, said: str) -> None:
    assert said in run(file, "say", *args, code=code).stderr
