"""ggraph-report: one page that holds what the tools it runs found, with a base and without."""
from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from ggraph.tools import report as command
from tests import spec, tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("report")
    spec.write(tiny.tiny(), made / "f.gguf")
    spec.write(tiny.tiny(), made / "q.gguf", "Q8_0")
    return made


def run(*args: str) -> str:
    done = CliRunner().invoke(command.main, ["-c", "64", "--chunks", "2", "-r", "1", "-q", *args])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_page_with_a_base(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    told = json.loads(run(str(folder / "q.gguf"), "--base", str(folder / "f.gguf"), "--json", "-o", str(out)))
    assert told["divergence"]["n_chunks"] == 2 and told["diff"]["swaps"]
    assert [s["name"] for s in told["speeds"]] == ["pp256", "tg32"]
    text = out.read_text()
    assert text.count("<svg") >= 7 and "Distance of the next token" in text and "Error by layer" in text
    assert not re.search(r"""(src|href)=["']?(http|//)|@import""", text)


def test_a_file_alone(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    assert run(str(folder / "f.gguf"), "-o", str(out), "--chunks", "1").strip() == str(out)
    assert "Attention as one op and as its parts" in out.read_text()
