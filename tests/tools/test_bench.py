"""ggraph-bench: what a command line means, and that every output holds every test."""
from __future__ import annotations

import csv
import io
import json
import re
import sqlite3
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ggraph.tools import bench
from tests import spec


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spec.write(spec.specs()["llama-dense-b"], tmp_path_factory.mktemp("bench") / "m.gguf")


@pytest.mark.parametrize(("given", "want"), [
    ((), [7]), (("4",), [4]), (("1,2", "8"), [1, 2, 8]), (("2-5",), [2, 3, 4, 5]), (("1-9+4",), [1, 5, 9]),
    (("8-64*2",), [8, 16, 32, 64]),
])
def test_numbers_are_lists_and_ranges(given: tuple[str, ...], want: list[int]) -> None:
    assert bench.numbers(given, 7) == want


@pytest.mark.parametrize("bad", ["x", "-1", "1-4*1", "0-4*2", "1-4+0", "1.5", "", "5-1"])
def test_bad_numbers_are_refused(bad: str) -> None:
    with pytest.raises(click.BadParameter):
        bench.numbers((bad,), 7)


def run(model: Path, *args: str) -> str:
    done = CliRunner().invoke(bench.main, ["-m", str(model), "-r", "2", "-q", "-t", "1", *args])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_markdown_names_tests_as_llama_bench_does(model: Path) -> None:
    text = run(model, "-p", "8", "-n", "4", "-pg", "8,4", "-d", "0,16", "-ctk", "f16,q8_0")
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    assert rows[0] == ["model", "size", "params", "backend", "threads", "type_k", "test", "t/s"]
    assert [r[6] for r in rows[2:8]] == ["pp8", "pp8 @ d16", "tg4", "tg4 @ d16", "pp8+tg4", "pp8+tg4 @ d16"]
    assert len(rows) == 2 + 12 and all(float(r[7].split("±")[0]) > 0 for r in rows[2:])


def test_machine_formats_hold_every_sample(model: Path) -> None:
    args = ("-p", "8", "-n", "4")
    whole = json.loads(run(model, *args, "-o", "json"))
    assert [(r["n_prompt"], r["n_gen"], len(r["samples_ns"])) for r in whole] == [(8, 0, 2), (0, 4, 2)]
    assert [json.loads(line)["n_gen"] for line in run(model, *args, "-o", "jsonl").splitlines()] == [0, 4]
    assert [r["n_prompt"] for r in csv.DictReader(io.StringIO(run(model, *args, "-o", "csv")))] == ["8", "0"]
    with sqlite3.connect(":memory:") as db:
        db.executescript(run(model, *args, "-o", "sql"))
        assert db.execute("SELECT n_prompt, n_gen FROM llama_bench").fetchall() == [(8, 0), (0, 4)]


def test_the_profile_names_ops_and_the_memory(model: Path) -> None:
    text = run(model, "-p", "8", "-n", "2", "--profile")
    assert "mul_mat F32" in text and "flash_attn_ext" in text and "read bandwidth" in text
    assert re.findall(r"^\w+, one step of it$", text, re.M) == ["pp8, one step of it", "tg2, one step of it"]


def test_json_is_a_form(model: Path) -> None:
    assert json.loads(run(model, "-p", "8", "-n", "0", "--json"))[0]["n_prompt"] == 8


def test_errors_are_one_sentence(tmp_path: Path, model: Path) -> None:
    for args, code, word in ((["-m", str(tmp_path / "no.gguf")], 1, "no.gguf"),
                             (["-m", str(model), "-p", "many"], 2, "--n-prompt: 'many'"),
                             (["-m", str(model), "-pg", "4"], 2, "PP,TG"), (["-m", str(model), "-ctk", "foo"], 2, "foo"),
                             (["-m", str(model), "-b", "0"], 2, "at least 1"), (["-p", "0", "-n", "0"], 2, "nothing to measure")):
        done = CliRunner().invoke(bench.main, args)
        assert done.exit_code == code and word in done.output and "Traceback" not in done.output
