"""What all commands do alike: outputs that cannot be written are refused before any work, streams that take no text end quietly."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ggraph.tools import diff, imatrix, perplexity, quantize, report, tracing
from ggraph.tools._input import read_text
from ggraph.tools._output import check_target, write_text
from tests import tiny

WRITERS = {
    "diff": (diff.main, ["MODEL", "-t", "1,2", "--html", "OUT"]), "report": (report.main, ["MODEL", "-o", "OUT"]),
    "trace": (tracing.main, ["-m", "MODEL", "--html", "OUT"]), "dot": (tracing.main, ["-m", "MODEL", "--dot", "OUT"]),
    "imatrix": (imatrix.main, ["-m", "MODEL", "-f", "TEXT", "-c", "16", "-o", "OUT"]),
    "quantize": (quantize.main, ["MODEL", "OUT", "Q8_0"]),
    "perplexity": (perplexity.main, ["-m", "MODEL", "-f", "TEXT", "-c", "16", "--save-all-logits", "OUT"])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("streams")
    tiny.write(made / "m.gguf")
    (made / "t.txt").write_text("the rain in the inn and the heron on a thin line. " * 20)
    (made / "dir").mkdir()
    return made


@pytest.mark.parametrize("target", ["dir", "nowhere/out"])
@pytest.mark.parametrize("name", WRITERS)
def test_an_output_that_cannot_be_written_is_refused(folder: Path, name: str, target: str) -> None:
    main, words = WRITERS[name]
    known = {"MODEL": folder / "m.gguf", "TEXT": folder / "t.txt", "OUT": folder / target}
    before = sorted(folder.rglob("*"))
    done = CliRunner().invoke(main, [str(known.get(word, word)) for word in words])
    assert done.exit_code in (1, 2), done.output
    said = done.stderr.strip().splitlines()
    assert str(folder / target) in said[-1] and "unexpected" not in said[-1] and "Traceback" not in done.output
    assert not any(" ..." in line and "loading" not in line for line in said), "nothing was done in vain"
    assert sorted(folder.rglob("*")) == before


def test_targets(folder: Path) -> None:
    check_target(None)
    check_target(folder / "new")
    with pytest.raises(IsADirectoryError):
        check_target(folder / "dir")
    with pytest.raises(IsADirectoryError):
        write_text(folder / "dir", "x")
    with pytest.raises(OSError, match="new"):
        check_target(folder / "m.gguf" / "new")
    assert not (folder / "new").exists()


def test_texts(folder: Path) -> None:
    (folder / "bytes").write_bytes(b"ab\xffc")
    (folder / "dos").write_bytes("ä\r\nb\r\n".encode())
    assert read_text(folder / "dos") == "ä\nb"
    done = CliRunner().invoke(diff.main, [str(folder / "m.gguf"), "-t", "1,2", "-f", str(folder / "bytes")])
    assert done.exit_code == 1 and "is not UTF-8 text (invalid start byte at byte 2)" in done.stderr


@pytest.mark.parametrize("shell", ["| head -1 > /dev/null; exit ${PIPESTATUS[0]}", "> /dev/full", ">&-"])
def test_streams_that_take_no_text(folder: Path, shell: str) -> None:
    command = f"{sys.executable} -m ggraph.tools.inspection {folder / 'm.gguf'} --vocab e --full --tensors {shell}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    assert "Traceback" not in done.stderr and "unexpected" not in done.stderr and done.stderr.count("\n") <= 1, done.stderr
    assert done.returncode == (1 if "full" in shell else 0) or (done.returncode == 1 and "head" in shell)


def test_a_terminal_without_these_letters(folder: Path) -> None:
    command = [sys.executable, "-m", "ggraph.tools.inspection", str(folder / "m.gguf"), "--vocab", "the"]
    done = subprocess.run(command, capture_output=True, timeout=300, env={**os.environ, "PYTHONIOENCODING": "latin-1"})
    assert done.returncode == 0 and b"?the" in done.stdout, done
