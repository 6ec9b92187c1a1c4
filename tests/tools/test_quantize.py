"""ggraph-quantize: the file it writes, what it refuses, and that nothing half-written stays."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import ggraph
from ggraph import dtypes, gguf, quants, writer
from ggraph.tools import _imatrix
from ggraph.tools._edit import split
from ggraph.tools.check import check
from ggraph.tools.quantize import main, quantize
from tests import tiny
from tests.tools.files import poke, wide


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wide(tmp_path_factory.mktemp("quantize") / "model.gguf")


def run(*args: Any, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [*map(str, args), "-q"])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def importance(source: Path, path: Path) -> Path:
    matrix = _imatrix.Matrix(datasets=["text.txt"], chunk_count=3, chunk_size=512)
    rng = np.random.default_rng(3)
    with gguf.File(source) as file:
        for t in file.tensors.values():
            if len(t.ne) > 1:
                sums = rng.chisquare(2, (1, t.ne[0])).astype(np.float32)
                matrix.entries[t.name] = _imatrix.Entry(sums, np.full(1, 10, np.float32))
    _imatrix.write(matrix, path)
    return path


def test_a_mix(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    text = run(source, out, "q4_k_m").stdout
    assert "Q4_K" in text and "bits/weight" in text and str(out) in text
    with gguf.File(source) as before, gguf.File(out) as after:
        assert list(before.tensors) == list(after.tensors)
        assert after.kv["general.file_type"] == 15 and after.kv["general.quantization_version"] == 2
        assert after.kv.raw("tokenizer.ggml.tokens") == before.kv.raw("tokenizer.ggml.tokens")
        for name, new in after.tensors.items():
            old = before.tensors[name]
            data = old.data.reshape(old.n_elements // old.ne[0], -1)
            wanted = data if new.type == old.type else quants.quantize(quants.unpack(data, old.type), new.type)
            assert np.array_equal(new.data, wanted.reshape(-1)), name
    assert check(out).ok and check(out).label == "Q4_K_M"
    with ggraph.Model(out) as model, ggraph.Context(model, n_ctx=64) as ctx:
        batch = ggraph.Batch()
        batch.add(1, 0, 0, output=True)
        ctx.process("decode", batch)
        assert np.isfinite(ctx.logits).all()


@pytest.mark.parametrize("kind", ["Q8_0", "Q2_K", "IQ4_XS", "TQ2_0", "BF16"])
def test_threads_change_nothing(source: Path, tmp_path: Path, kind: str) -> None:
    for n in (1, 3):
        quantize(source, tmp_path / f"{n}.gguf", kind, n_threads=n)
    assert (tmp_path / "1.gguf").read_bytes() == (tmp_path / "3.gguf").read_bytes()


def test_dry_run_is_what_comes(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    told = json.loads(run(source, out, "Q3_K_S", "--dry-run", "--json").stdout)
    assert not out.exists() and not told["paths"]
    done = json.loads(run(source, out, "Q3_K_S", "--json").stdout)
    assert told["rows"] == done["rows"] and told["types"] == done["types"] and done["paths"] == [str(out)]
    with gguf.File(out) as file:
        assert {t.name: (t.type.name, t.nbytes) for t in file.tensors.values()} == {
            r["name"]: (r["after"], r["nbytes_after"]) for r in done["rows"]}
    assert "blk.1.ffn_down.weight" in run(source, out, "Q3_K_S", "--dry-run").stdout


def test_types_that_do_not_fit_are_told(source: Path, tmp_path: Path) -> None:
    narrow = tiny.write(tmp_path / "narrow.gguf")       # rows of 64 and 96: no whole blocks of 256, and all of 32
    result = CliRunner().invoke(main, [str(narrow), str(tmp_path / "out.gguf"), "Q4_K_M"])
    with gguf.File(tmp_path / "out.gguf") as file:
        matrices = [t for t in file.tensors.values() if len(t.ne) > 1 and t.name != "output.weight"]
    assert all(t.type.name in ("Q5_0", "Q8_0") for t in matrices)
    assert f"{len(matrices)} tensors have rows that are no whole blocks of the type that Q4_K_M has for them" in result.stderr
    told = json.loads(run(narrow, tmp_path / "out.gguf", "Q4_K_M", "--json").stdout)["displaced"]
    assert sorted(told) == sorted(t.name for t in matrices)
    for file_, kind in (source, "Q4_K_M"), (narrow, "Q8_0"), (narrow, "F16"):
        assert "whole blocks" not in CliRunner().invoke(main, [str(file_), str(tmp_path / "out.gguf"), kind]).stderr


def test_wishes(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    run(source, out, "Q4_0", "--tensor-type", r"blk\.1\.ffn=q5_1", "--output-tensor-type", "bf16", "--token-embedding-type", "q8_0")
    with gguf.File(out) as file:
        types = {name: t.type.name for name, t in file.tensors.items()}
    assert types["blk.1.ffn_up.weight"] == "Q5_1" and types["blk.0.ffn_up.weight"] == "Q4_0"
    assert types["output.weight"] == "BF16" and types["token_embd.weight"] == "Q8_0"
    run(source, out, "Q4_0", "--pure", "--leave-output-tensor")
    with gguf.File(out) as file:
        assert {t.type.name for name, t in file.tensors.items() if "norm" not in name} == {"Q4_0", "F32"}
        assert file.tensors["output.weight"].type.name == "F32"


def test_importance(source: Path, tmp_path: Path) -> None:
    matrix, out, plain = importance(source, tmp_path / "imatrix.gguf"), tmp_path / "out.gguf", tmp_path / "plain.gguf"
    run(source, out, "IQ3_S", "--imatrix", matrix)
    run(source, plain, "IQ3_S")
    with gguf.File(out) as file, gguf.File(plain) as other:
        assert file.kv["quantize.imatrix.dataset"] == "text.txt" and file.kv["quantize.imatrix.chunks_count"] == 3
        assert file.kv["quantize.imatrix.file"] == "imatrix.gguf"
        name = "blk.0.ffn_up.weight"
        assert not np.array_equal(file.tensors[name].data, other.tensors[name].data)
        weights = _imatrix.read(matrix).entries[name].mean[0]
        with gguf.File(source) as raw:
            x = raw.tensors[name].data.view(np.float32).reshape(-1, 256)
        assert np.array_equal(quants.quantize(x, dtypes.IQ3_S, weights).reshape(-1), file.tensors[name].data)


@pytest.mark.parametrize("kind", ["IQ2_XXS", "IQ1_M", "Q2_K_S"])
def test_low_types_need_importance(source: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out.gguf"
    assert "needs an importance matrix" in run(source, out, kind, code=1).stderr
    assert json.loads(run(source, out, kind, "--dry-run", "--json").stdout)["without_importance"] and not out.exists()
    run(source, out, kind, "--imatrix", importance(source, tmp_path / "i.gguf"))
    assert check(out).label == kind
    assert "that has it" in run(source, out, kind, "--imatrix", _partial(source, tmp_path), code=1).stderr


def _partial(source: Path, folder: Path) -> Path:
    matrix = _imatrix.read(importance(source, folder / "part.gguf"))
    del matrix.entries["blk.1.attn_q.weight"]
    _imatrix.write(matrix, folder / "part.gguf")
    return folder / "part.gguf"


def test_the_other_ways_in_which_llama_quantize_is_told(source: Path, tmp_path: Path) -> None:
    """A number for the mix, threads behind it, types in a file, importance for some tensors, key/values."""
    types, out, plain = tmp_path / "types.txt", tmp_path / "out.gguf", tmp_path / "plain.gguf"
    types.write_text("attn_k=q5_1\nffn_up=q8_0  ffn_gate=q8_0\n")
    matrix = importance(source, tmp_path / "i.gguf")
    run(source, out, "12", 1, "--tensor-type-file", types, "--imatrix", matrix, "--exclude-weights", "ffn_down",
        "--override-kv", "general.name=str:x,a.b=int:7,a.c=bool:true,a.d=float:0.5")
    run(source, plain, "Q3_K_M", "--tensor-type-file", types)
    with gguf.File(out) as file, gguf.File(plain) as other:
        assert file.kv["general.file_type"] == 12 and file.kv["general.name"] == "x"
        for key, kind, value in (("a.b", "UINT32", 7), ("a.c", "BOOL", True), ("a.d", "FLOAT32", 0.5)):
            assert writer.encode(kind, value) == writer.raw_kv(file)[key]
        assert {file.tensors[f"blk.0.{n}.weight"].type.name for n in ("ffn_up", "ffn_gate")} == {"Q8_0"}
        assert file.tensors["blk.1.attn_k.weight"].type.name == "Q5_1"
        same = {name: np.array_equal(t.data, other.tensors[name].data) for name, t in file.tensors.items()}
        assert same["blk.0.ffn_down.weight"] and not same["blk.0.attn_q.weight"]
    only = tmp_path / "only.gguf"
    run(source, only, "Q3_K_M", "--tensor-type-file", types, "--imatrix", matrix, "--include-weights", "attn_q")
    with gguf.File(only) as file, gguf.File(plain) as other:
        changed = {name for name, t in file.tensors.items() if not np.array_equal(t.data, other.tensors[name].data)}
        assert changed == {"blk.0.attn_q.weight", "blk.1.attn_q.weight"}


@pytest.mark.parametrize("kv", ["general.architecture=int:3", "llama.block_count=str:two", "tokenizer.ggml.tokens=str:x"])
def test_a_key_keeps_its_kind(source: Path, tmp_path: Path, kv: str) -> None:
    out = tmp_path / "out.gguf"
    assert "the file has" in run(source, out, "Q8_0", "--override-kv", kv, code=1).stderr
    assert not out.exists()


def test_importance_of_another_model(source: Path, tmp_path: Path) -> None:
    path = importance(source, tmp_path / "i.gguf")
    matrix = _imatrix.read(path)
    matrix.entries["blk.0.attn_q.weight"].sums = np.ones((1, 77), np.float32)
    _imatrix.write(matrix, path)
    assert "of another model" in run(source, tmp_path / "o.gguf", "Q4_K_M", "--imatrix", path, code=1).stderr


def test_requantizing_must_be_allowed(source: Path, tmp_path: Path) -> None:
    middle, out = tmp_path / "q8.gguf", tmp_path / "out.gguf"
    run(source, middle, "Q8_0")
    assert "--allow-requantize" in run(middle, out, "Q4_0", code=1).stderr
    assert not out.exists()
    run(middle, out, "Q4_0", "--allow-requantize")
    assert check(out).label == "Q4_0"


def test_keep_split(source: Path, tmp_path: Path) -> None:
    parts = split(source, tmp_path / "in", max_tensors=8)
    made = quantize(parts[1], tmp_path / "out.gguf", "Q5_K_M", keep_split=True)
    assert [Path(p).name for p in made.paths] == [f"out-{i + 1:05d}-of-{len(parts):05d}.gguf" for i in range(len(parts))]
    whole = quantize(source, tmp_path / "whole.gguf", "Q5_K_M")
    with gguf.File(made.paths[0]) as a, gguf.File(whole.paths[0]) as b:
        assert [t.shard for t in a.tensors.values()][-1] == len(parts) - 1
        assert all(np.array_equal(a.tensors[name].data, t.data) for name, t in b.tensors.items())


def test_rows_that_are_no_whole_blocks(tmp_path: Path) -> None:
    """As llama.cpp: a type with smaller blocks, or F16."""
    kv = {"general.architecture": writer.encode("STRING", "llama"), "llama.block_count": writer.encode("UINT32", 1)}
    specs = [writer.Spec(f"blk.0.{name}.weight", ne, dtypes.F32) for name, ne in (("attn_q", (96, 4)), ("attn_k", (100, 4)))]
    with writer.replacing(tmp_path / "in.gguf") as out:
        made = writer.Writer(out, kv, specs)
        for s in specs:
            made.write(np.random.default_rng(1).standard_normal(s.nbytes // 4).astype(np.float32).view(np.uint8))
        made.finish()
    quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "Q4_K_S")
    with gguf.File(tmp_path / "out.gguf") as file:
        assert [t.type.name for t in file.tensors.values()] == ["Q5_0", "F16"]


def test_experts_have_their_own_importance(tmp_path: Path) -> None:
    kv = {"general.architecture": writer.encode("STRING", "llama"), "llama.block_count": writer.encode("UINT32", 1)}
    name, x = "blk.0.ffn_up_exps.weight", np.random.default_rng(1).standard_normal((3, 5, 256)).astype(np.float32)
    with writer.replacing(tmp_path / "in.gguf") as out:
        made = writer.Writer(out, kv, [writer.Spec(name, (256, 5, 3), dtypes.F32)])
        made.write(x.reshape(-1).view(np.uint8))
        made.finish()
    sums = np.random.default_rng(2).chisquare(1, (3, 256)).astype(np.float32)
    matrix = _imatrix.Matrix({name: _imatrix.Entry(sums, np.array([2, 0, 5], np.float32))})
    _imatrix.write(matrix, tmp_path / "i.gguf")
    quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "IQ4_XS", imatrix=[tmp_path / "i.gguf"])
    with gguf.File(tmp_path / "out.gguf") as file:
        got = file.tensors[name].data.reshape(3, 5, -1)
    for e, mean in enumerate((sums[0] / 2, np.ones(256, np.float32), sums[2] / 5)):
        assert np.array_equal(got[e], quants.quantize(x[e], dtypes.IQ4_XS, mean))


def test_damaged_input_leaves_nothing(source: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(source.read_bytes())
    poke(bad, "blk.1.ffn_up.weight", 400, np.float32(np.nan).tobytes())
    assert "blk.1.ffn_up.weight" in run(bad, tmp_path / "out.gguf", "Q4_K_M", code=1).stderr
    assert list(tmp_path.iterdir()) == [bad]


@pytest.mark.parametrize("args, code, message", [
    (("Q9_K",), 1, "no type or mix"), (("Q4_0", "--tensor-type", "x"), 2, "PATTERN=TYPE"),
    (("Q4_0", "--tensor-type", "(=q4_0"), 2, "regular"),
    (("Q4_0", "--output-tensor-type", "q8_k"), 2, "no type that can be written")])
def test_refusals(source: Path, tmp_path: Path, args: tuple[str, ...], code: int, message: str) -> None:
    assert message in run(source, tmp_path / "out.gguf", *args, code=code).stderr
    assert "is the input" in run(source, source, "Q4_0", code=1).stderr
    assert not list(tmp_path.iterdir())
