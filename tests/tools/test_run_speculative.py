"""ggraph-run with guesses: what --spec-type and its kin do, and that the text stays."""
from __future__ import annotations

import json
from pathlib import Path

import pytest

from ggraph import env
from tests import nextn, spec, tiny
from tests.tools.test_run import run

EXACT = env.get("GGRAPH_BACKEND") != "ref"              # BLAS sums in an order that depends on the shape


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write(tmp_path_factory.mktemp("run") / "tiny.gguf"))


@pytest.mark.parametrize("seed", ["--temp=0", "--seed=5"])
def test_speculative(file: str, seed: str) -> None:
    args = "-m", file, "-c", "256", seed, "-n", "40", "--json", "the rain the rain the rain the rain"
    plain = json.loads(run(*args).stdout)
    assert "draft_n" not in plain["timings"]
    for more in (("--spec-type", "draft-simple", "-md", file, "--spec-draft-n-max", "5"),
                 ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "1", "--spec-ngram-simple-size-m", "4")):
        r = run(*args, *more)
        out = json.loads(r.stdout)
        n, accepted = out["timings"]["draft_n"], out["timings"]["draft_n_accepted"]
        assert (out["text"], out["tokens"]) == (plain["text"], plain["tokens"])
        assert f"({accepted:5d} accepted / {n:5d} drafted)" in r.stderr
        assert accepted == n if "-md" in more and EXACT else accepted <= n
    assert json.loads(run(*args, *more[:2], "--spec-ngram-simple-size-n", "60").stdout)["text"] == plain["text"]
    out = run(*args, "-md", file, "--spec-type", "draft-simple", "--spec-draft-n-min", "4", "--spec-draft-p-min", "0.99")
    assert "draft_n" not in json.loads(out.stdout)["timings"]
    assert "the draft model is not used" in run(*args, "-md", file).stderr
    assert "give -md" in run(*args, "--spec-type", "draft-simple", code=2).stderr


def test_speculative_tree(file: str) -> None:
    """Several guesses at once; the text stays."""
    args = "-m", file, "-c", "256", "--temp", "1", "--seed", "5", "-n", "30", "--json", "the rain the sun the rain the wind the"
    plain = json.loads(run(*args).stdout)
    for more in (("draft-simple", "-md", file, "--spec-draft-n-max", "4"), ("ngram-simple", "--spec-ngram-simple-size-n", "1")):
        chain, tree = (json.loads(run(*args, "--spec-type", *more, *branches).stdout)
                       for branches in ((), ("--spec-draft-n-branch", "3")))
        assert chain["tokens"] == tree["tokens"] == plain["tokens"]
        assert tree["timings"]["draft_n"] > chain["timings"]["draft_n"]
    assert "give --spec-type" in run(*args, "--spec-draft-n-branch", "2", code=2).stderr
    assert "--spec-draft-n-branch" in run("--help").stdout


def test_speculative_mtp(file: str, tmp_path: Path) -> None:
    path = str(spec.write(nextn.speaking("glm4moe-moe"), tmp_path / "mtp.gguf"))
    args = "-m", path, "-c", "256", "--temp", "0", "-n", "20", "--json", "the rain"
    out = json.loads(run(*args, "--spec-type", "draft-mtp", "--spec-draft-n-max", "2").stdout)
    assert out["tokens"] == json.loads(run(*args).stdout)["tokens"]
    assert out["timings"]["draft_n"] > 0
    assert "holds no block for next-token prediction" in run("-m", file, "--spec-type", "draft-mtp", "a", code=1).stderr
