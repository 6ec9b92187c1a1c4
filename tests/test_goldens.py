"""The full set of goldens, by its own check.py, for the architectures that exist. Needs GGRAPH_GOLDENS."""
from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ggraph import env
from ggraph.model import known_architectures

GOLDENS = Path(env.get("GGRAPH_GOLDENS")).resolve()
KNOWN = {name.replace("_", dash) for name in known_architectures() for dash in "_-"}


def check(*args: str | Path) -> None:
    done = subprocess.run([sys.executable, GOLDENS / "check.py", *args], text=True, capture_output=True, cwd=GOLDENS)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def specs() -> list[str]:
    return [p.stem for p in sorted((GOLDENS / "specs").glob("*.json")) if json.loads(p.read_text())["arch"] in KNOWN]


def variants() -> list[str]:
    return [c["name"] for c in json.loads((GOLDENS / "extra/cases.json").read_text()) if c["spec"]["arch"] in KNOWN]


@pytest.mark.parametrize("what", ["vocab", "chat"])
def test_text(what: str) -> None:
    check(what)


def test_embed() -> None:
    check("embed")


def test_samplers(smollm2: Path) -> None:
    check("samplers", "--model", smollm2)


@pytest.mark.parametrize("name", specs())
def test_arch(name: str) -> None:
    check("arch", "--only", f"^{re.escape(name)}$")


@pytest.mark.parametrize("name", variants())
def test_extra(name: str) -> None:
    check("extra", "--only", f"^{re.escape(name)}$")


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_real(name: str, request: pytest.FixtureRequest) -> None:
    check("real", "--name", name, "--model", request.getfixturevalue(name))
