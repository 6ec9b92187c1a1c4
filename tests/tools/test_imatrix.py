"""ggraph-imatrix: sums of squares of what matrices are multiplied with, files in both forms, merging."""
from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import ggraph
from ggraph import gguf
from ggraph.tools import _imatrix
from ggraph.tools.imatrix import collect, main, statistics
from tests import spec, tiny

TEXT = "the rain in the land and the sea, on and on. " * 20


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write(tmp_path_factory.mktemp("imatrix") / "tiny.gguf"))


def run(*args: Any, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [*map(str, args), "-q"])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def test_the_first_layer_by_hand(file: str) -> None:
    """What attn_q of layer 0 sees: the embeddings, normed."""
    with ggraph.Model(file) as model:
        tokens = model.vocab.encode(TEXT)[:64]
        matrix = collect(model, tokens, 32)
        expected = tokens[:]
        expected[0] = expected[32] = tiny.BOS
        with gguf.File(file) as opened:
            rows = opened.tensors["token_embd.weight"].data.view(np.float32).reshape(-1, tiny.N_EMBD)[expected]
            norm = opened.tensors["blk.0.attn_norm.weight"].data.view(np.float32)
    x = rows / np.sqrt(np.mean(rows * rows, axis=1, keepdims=True) + 1e-5) * norm
    for name in ("attn_q", "attn_k", "attn_v"):
        entry = matrix.entries[f"blk.0.{name}.weight"]
        np.testing.assert_allclose(entry.sums[0], (x * x).sum(axis=0), rtol=1e-3)
        assert entry.counts.tolist() == [64]
    assert (matrix.chunk_count, matrix.chunk_size) == (2, 32)


def test_every_matrix_of_the_layers_is_there(file: str) -> None:
    with ggraph.Model(file) as model:
        tokens = model.vocab.encode(TEXT)[:96]
        plain, more = collect(model, tokens, 32), collect(model, tokens, 32, process_output=True)
    matrices = {t[0] for t in tiny.tensors() if len(t[1]) > 1 and t[0].startswith("blk.")}
    assert plain.entries.keys() == matrices and more.entries.keys() == matrices | {"output.weight"}
    assert all(e.counts.tolist() == [96] and (e.sums > 0).all() for e in more.entries.values())


def test_chunks_are_summed(file: str) -> None:
    with ggraph.Model(file) as model:
        tokens = model.vocab.encode(TEXT)[:64]
        whole, parts = collect(model, tokens, 32), _imatrix.Matrix()
        for i in (0, 32):
            parts.add(collect(model, tokens[i:i + 32], 32))
    for name, entry in whole.entries.items():
        np.testing.assert_allclose(parts.entries[name].sums, entry.sums, rtol=1e-5)
    assert parts.chunk_count == 2


@pytest.mark.parametrize("name", ["qwen3moe-moe", "deepseek2-moe", "llama-moe"])
def test_experts_apart(name: str, tmp_path: Path) -> None:
    path = spec.write(spec.specs()[name], tmp_path / "m.gguf")
    with ggraph.Model(path) as model:
        n_used, n_expert = int(np.max(model.hparams.n_expert_used)), model.hparams.n_expert
        matrix = collect(model, [i % 30 for i in range(32)], 16)
    experts = {k: e for k, e in matrix.entries.items() if "_exps" in k}
    assert experts
    for entry in experts.values():
        assert len(entry.sums) == n_expert and entry.counts.sum() == 32 * n_used
        assert ((entry.sums.sum(axis=1) > 0) == (entry.counts > 0)).all()
    gates = [e for k, e in experts.items() if "ffn_down" not in k]
    router = next(e for k, e in matrix.entries.items() if "ffn_gate_inp" in k)
    np.testing.assert_allclose(gates[0].sums.sum(axis=0), n_used * router.sums[0], rtol=1e-3)


def test_the_command(file: str, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "i.gguf"
    text.write_text(TEXT)
    told = json.loads(run("-m", file, "-f", text, "-c", 32, "--chunks", 2, "-o", out, "--json").stdout)
    assert told["chunk_count"] == 2 and len(told["tensors"]) == 14 and told["datasets"] == [str(text)]
    with gguf.File(out) as made:
        assert made.kv["general.type"] == "imatrix" and made.kv["imatrix.chunk_size"] == 32
        assert made.tensors["blk.0.attn_q.weight.in_sum2"].ne == (64, 1)
        assert made.tensors["blk.0.attn_q.weight.counts"].ne == (1, 1)
    twice = tmp_path / "twice.gguf"
    run("--in-file", out, "--in-file", out, "-o", twice)
    one, two = _imatrix.read(out), _imatrix.read(twice)
    assert two.chunk_count == 4 and two.datasets == [str(text)]
    for name, entry in one.entries.items():
        np.testing.assert_allclose(two.entries[name].mean, entry.mean, rtol=1e-6)
    assert "blk.0.ffn_down.weight" in run("--in-file", out, "--show-statistics").stdout


def test_special_tokens_are_letters_unless_asked_for(file: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("<|im_end|> the rain " * 40)
    rows = [json.loads(run("-m", file, "-f", text, "-c", 8, "-o", tmp_path / "i", "--json", *more).stdout)["chunk_count"]
            for more in ((), ("--parse-special",))]
    assert rows[0] > rows[1]


def test_the_old_form(tmp_path: Path) -> None:
    path, values = tmp_path / "i.dat", np.array([2, 4, 6], np.float32)
    path.write_bytes(struct.pack("<ii4sii", 1, 4, b"name", 2, 3) + values.tobytes() + struct.pack("<ii4s", 7, 4, b"text"))
    matrix = _imatrix.read(path)
    assert matrix.entries["name"].mean[0].tolist() == [1, 2, 3] and matrix.chunk_count == 7 and matrix.datasets == ["text"]
    path.write_bytes(path.read_bytes()[:20])
    assert "cut short" in run("--in-file", path, code=1).stderr


def test_damaged_files(file: str, tmp_path: Path) -> None:
    assert "no importance matrix" in run("--in-file", file, "-o", tmp_path / "x", code=1).stderr
    path = tmp_path / "i.gguf"
    _imatrix.write(_imatrix.Matrix({"a": _imatrix.Entry(np.array([[1, np.nan]], np.float32), np.ones(1, np.float32))}), path)
    assert "no sums of squares" in run("--in-file", path, "-o", tmp_path / "x", code=1).stderr
    _imatrix.write(_imatrix.Matrix(), path)
    assert "nothing in it" in run("--in-file", path, "-o", tmp_path / "x", code=1).stderr
    for name, width in (("b", 2), ("c", 3)):
        entry = _imatrix.Entry(np.ones((1, width), np.float32), np.ones(1, np.float32))
        _imatrix.write(_imatrix.Matrix({"a": entry}), tmp_path / name)
    both = ("--in-file", tmp_path / "b", "--in-file", tmp_path / "c")
    assert "not of the same model" in run(*both, "-o", tmp_path / "x", code=1).stderr
    assert not (tmp_path / "x").exists()


def test_refusals(file: str, tmp_path: Path) -> None:
    text = tmp_path / "t"
    text.write_text("the rain")
    assert "one chunk needs" in run("-m", file, "-f", text, "-c", 64, "-o", tmp_path / "x", code=1).stderr
    assert "give a model" in run(code=2).stderr and "go together" in run("-m", file, "--in-file", text, code=2).stderr
    assert not (tmp_path / "x").exists()


def test_statistics() -> None:
    flat = _imatrix.Entry(np.full((1, 8), 6, np.float32), np.full(1, 3, np.float32))
    uneven = _imatrix.Entry(np.eye(2, 8, dtype=np.float32), np.array([1, 4], np.float32))
    a, b = statistics(_imatrix.Matrix({"flat": flat, "uneven": uneven}))
    assert (a.name, a.mean, a.n_rows, round(a.evenness, 5)) == ("flat", 2, 3, 1)
    assert (b.name, b.largest, b.n_rows, b.n_matrices) == ("uneven", 1, 1, 2) and b.evenness < 0.3
