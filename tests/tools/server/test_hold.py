"""What must hold under load: every answer is that of a lone request, slots and cells are free in the end, memory stays flat."""
from __future__ import annotations

import json
import random
import re
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests import tiny
from tests.tools.server import hold
from tests.tools.server.conftest import Server, running


@contextmanager
def fresh(model: Path | str, *args: str) -> Iterator[Server]:
    with (tempfile.TemporaryDirectory() as folder,
          running("-m", str(model), "-np", "16", "-ub", "64", "-cram", "32", "--slot-save-path", folder, *args) as server):
        yield server
        assert server.process.poll() is None, server.log
        assert server.stop() == 0
        assert not [line for line in server.log if "unexpected" in line or "failed" in line or "Traceback" in line], server.log


def check_isolation(server: Server, prompts: list[str], codes: list[str], n_predict: int) -> int:
    """How many answers came, all of which were right."""
    got = hold.isolation(server.url, prompts, n_predict)
    hold.settled(server.url)
    kept = [i for i, answer in enumerate(got) if answer is not None]
    want = dict(zip(kept, hold.lone(server.url, [prompts[i] for i in kept], n_predict)))
    wrong = [(i, got[i], want[i]) for i in kept if got[i] != want[i]]
    assert not wrong, (len(wrong), len(kept), wrong[:3])
    strange = [(i, code) for i in kept for code in re.findall(r"\b[A-Z]{4}\d{4}\b", want[i][0]) if code in {*codes} - {codes[i]}]
    assert not strange, strange[:3]
    check_free(server)
    assert len(kept) >= len(prompts) // 2
    return len(kept)


def check_free(server: Server) -> None:
    """Once the slots have forgotten what they hold, a prompt finds every cell but the last."""
    slots = hold.settled(server.url)
    for slot in slots:
        assert httpx.post(f"{server.url}/slots/{slot['id']}?action=erase", json={}).status_code == 200
    assert not any(s["n_past"] for s in hold.settled(server.url))
    body = {"prompt": [10] * (slots[0]["n_ctx"] - 1), "n_predict": 1, "cache_prompt": False}
    answer = httpx.post(f"{server.url}/completion", json=body, timeout=600)
    assert answer.status_code == 200, answer.text


def code_words(n: int, seed: int = 3) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=4)) + f"{i:04}" for i in range(n)]


def nonsense(n: int, longest: int = 60) -> list[str]:
    """Prompts of the tiny models' letters, each with a code word of its own, some with a common start."""
    rng = random.Random(4)
    text = ["the rain in an air on a tin " * (i % 3) + "".join(rng.choice("etaoin shr") for _ in range(rng.randrange(1, longest)))
            for i in range(n)]
    return [f"{a} {code}" for a, code in zip(text, code_words(n))]


@pytest.mark.parametrize("write", [tiny.write, tiny.write_hybrid])
@pytest.mark.parametrize("more", [[], ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "2", "-c", "768"]],
                         ids=["plain", "guessing"])
def test_isolation(tmp_path: Path, write: object, more: list[str]) -> None:
    assert callable(write)
    with fresh(write(tmp_path / "m.gguf"), "-c", "4096", *more) as server:
        check_isolation(server, nonsense(64), code_words(64), 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3", "hybrid", "dense"])
def test_isolation_of_a_thousand(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """On real models each prompt asks for its code word, which the answer then holds."""
    codes = code_words(1000)
    if name in ("hybrid", "dense"):
        model = (tiny.write_hybrid if name == "hybrid" else tiny.write)(tmp_path / "m.gguf")
        prompts = nonsense(1000)
    else:
        model = request.getfixturevalue(name)
        prompts = [f"The code word is {code}. Remember it well, as it opens the door. Question: What is the code word? "
                   f"Answer: The code word is" for code in codes]
    with fresh(model, "-c", "8192") as server:
        n = check_isolation(server, prompts, codes, 12)
    print(f"isolation {name}: {n} of 1,000 answers came, all right")


def check_soak(server: Server, n: int) -> None:
    hold.soak(server.url, server.process.pid, n // 4, seed=1)         # plans are built, caches fill
    ends, sizes = hold.soak(server.url, server.process.pid, n)
    assert set(ends) <= {"200", "400", "aborted"} and ends["200"] > n // 2, ends
    hold.settled(server.url)
    quarter = len(sizes) // 4
    first, last = statistics.mean(sizes[:quarter]), statistics.mean(sizes[-quarter:])
    print(f"soak of {n}: {json.dumps(ends)}, resident {first:.1f} MiB in the first quarter, {last:.1f} in the last")
    assert last < first + 8


def test_soak(tmp_path: Path) -> None:
    with fresh(tiny.write(tmp_path / "m.gguf"), "-c", "2048", "-cram", "1") as server:
        check_soak(server, 120)


@pytest.mark.slow
def test_soak_of_two_thousand(tmp_path: Path) -> None:
    with fresh(tiny.write(tmp_path / "m.gguf"), "-c", "2048", "-cram", "1") as server:
        check_soak(server, 2000)
