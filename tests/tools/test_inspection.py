"""ggraph-inspect: what it shows, and that changes are safe and exact."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import ggraph
from ggraph import gguf
from ggraph.tools import _edit
from ggraph.tools.inspection import find_tokens, inspect, main
from tests import tiny


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write(tmp_path_factory.mktemp("inspect") / "tiny.gguf"))


def run(*args: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [*args, "-q"])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def asked(*args: str) -> dict[str, Any]:
    return dict(json.loads(run(*args, "--json").stdout))


def test_the_usual_view(file: str) -> None:
    text = run(file).stdout
    assert text.startswith("tiny.gguf: llama, no label, 0.")
    assert "tokenizer.ggml.tokens" in text and f"STRING[{tiny.N_VOCAB}]" in text and f"and {tiny.N_VOCAB - 6} more" in text
    assert "100.00%" in text and "32.0000 bits/weight" in text


def test_full_values(file: str) -> None:
    short, full = asked(file)["kv"], asked(file, "--kv", "--full")["kv"]
    assert len(short["tokenizer.ggml.tokens"]["value"]) == 6
    assert full["tokenizer.ggml.tokens"]["value"] == tiny.TOKENS and full["tokenizer.chat_template"]["value"] == tiny.TEMPLATE


def test_sizes_add_up(file: str) -> None:
    seen = inspect(file)
    with gguf.File(file) as opened:
        total = sum(t.nbytes for t in opened.tensors.values())
    assert sum(s.nbytes for s in seen.types) == sum(s.nbytes for s in seen.layers) == sum(t.nbytes for t in seen.tensors) == total
    assert [s.name for s in seen.layers] == ["", "0", "1"] and seen.types[0].bpw == 32
    assert len(asked(file, "--tensors")["tensors"]) == len(seen.tensors)
    assert "blk.0.attn_q.weight" in run(file, "--tensors").stdout and "layer 1" in run(file, "--layers").stdout


def test_tokens(file: str) -> None:
    assert [t.text for t in find_tokens(file, "▁the")] == ["▁the"]
    assert find_tokens(file, "#1")[0] == find_tokens(file, "<s>")[0]
    assert find_tokens(file, "<s>")[0].type == "control"
    assert "1 tokens" in run(file, "--vocab", "#1").stdout


def test_the_template_alone(file: str) -> None:
    assert run(file, "--template").stdout == tiny.TEMPLATE + "\n"


def test_memory_is_what_a_context_takes(file: str) -> None:
    told = asked(file, "--memory", "-c", "300", "-np", "2", "-ctk", "q8_0")["memory"]
    with ggraph.Model(file) as model, ggraph.Context(model, n_ctx=300, n_seq_max=2, type_k="q8_0") as ctx:
        assert {name: told[name] for name in ctx.bytes} == ctx.bytes
    assert told["state"] == 0 and told["total"] == sum(told[name] for name in ("weights", "kv", "state", "compute"))


def test_edit(file: str, tmp_path: Path) -> None:
    before, out = Path(file).read_bytes(), str(tmp_path / "out.gguf")
    text = tmp_path / "text"
    text.write_text("{{ x }}")
    run(file, "--set", "general.name=str:new = name", "--set", "llama.context_length=1024", "--set", "a.list=i32[]:[1, 2]",
        "--set-file", f"tokenizer.chat_template={text}", "--remove", "tokenizer.ggml.scores", "--rename",
        "output_norm.weight=x.weight", "-o", out)
    with gguf.File(out) as new, gguf.File(file) as old:
        assert new.kv["general.name"] == "new = name" and new.kv["tokenizer.chat_template"] == "{{ x }}"
        assert (new.kv["llama.context_length"], new.kv.kind("llama.context_length")) == (1024, "UINT32")
        assert new.kv["a.list"].tolist() == [1, 2] and "tokenizer.ggml.scores" not in new.kv
        assert new.tensors["x.weight"].data.tolist() == old.tensors["output_norm.weight"].data.tolist()
        assert new.kv.raw("tokenizer.ggml.tokens") == old.kv.raw("tokenizer.ggml.tokens")
    assert Path(file).read_bytes() == before


@pytest.mark.parametrize("args, code, message", [
    (("--set", "new.key=5", "-o", "x.gguf"), 1, "say its type"),
    (("--set", "llama.context_length=u8:300", "-o", "x.gguf"), 1, "300"),
    (("--set", "llama.context_length=many", "-o", "x.gguf"), 1, "not a value of type UINT32"),
    (("--set", "a=i32[]:1", "-o", "x.gguf"), 1, "JSON"),
    (("--set", "nothing", "-o", "x.gguf"), 2, "NAME=VALUE"),
    (("--set", "a=u8:1"), 2, "give -o FILE"),
    (("--set", "a=u8:1", "-o", "x.gguf", "--in-place"), 2, "give -o FILE"),
    (("--remove", "nonesuch", "-o", "x.gguf"), 1, "no key"),
    (("--rename", "nonesuch=x", "-o", "x.gguf"), 1, "no tensor"),
    (("--rename", "output.weight=output_norm.weight", "-o", "x.gguf"), 1, "two tensors"),
    (("-o", "x.gguf"), 2, "no change"),
    (("--split-max-size", "2K", "-o", "x"), 2, "2K"),
    (("--split-max-tensors", "3", "--merge", "-o", "x"), 2, "none of the other"),
])
def test_refusals_write_nothing(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], code: int,
                                message: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in run(file, *args, code=code).stderr
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    path, other = tiny.write(tmp_path / "a.gguf"), tiny.write(tmp_path / "b.gguf")
    assert "--force" in run(str(path), "--set", "x=u8:1", "-o", str(other), code=1).stderr
    run(str(path), "--set", "x=u8:1", "-o", str(other), "--force")
    run(str(path), "--set", "x=u8:2", "--in-place")
    with gguf.File(path) as a, gguf.File(other) as b:
        assert (a.kv["x"], b.kv["x"]) == (2, 1)


def test_split_and_merge(file: str, tmp_path: Path) -> None:
    made = run(file, "--split-max-tensors", "9", "-o", str(tmp_path / "m")).stdout.split()
    assert [Path(p).name for p in made] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert "is there already" in run(file, "--split-max-tensors", "9", "-o", str(tmp_path / "m"), code=1).stderr
    assert len(inspect(made[1]).parts) == 3 and inspect(made[1]).tensors[-1].part == 2
    assert "part of a set" in run(made[0], "--set", "x=u8:2", "--in-place", code=1).stderr
    run(made[2], "--merge", "-o", str(tmp_path / "whole.gguf"))
    assert (tmp_path / "whole.gguf").read_bytes() == Path(file).read_bytes()


def test_split_by_size(file: str, tmp_path: Path) -> None:
    paths = _edit.split(file, tmp_path / "m", max_bytes=100_000)
    assert len(paths) > 2
    with gguf.File(paths[0]) as whole:
        parts = [[t for t in whole.tensors.values() if t.shard == i] for i in range(len(paths))]
        assert all(len(p) == 1 or sum(t.nbytes for t in p) <= 100_000 for p in parts)


def test_a_failed_split_leaves_nothing(file: str, tmp_path: Path) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if done == 12:
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        _edit.split(file, tmp_path / "m", max_tensors=5, progress=stop)
    assert not list(tmp_path.iterdir())
