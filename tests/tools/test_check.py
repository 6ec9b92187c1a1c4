"""ggraph-check: each thing that can be wrong is found, named, and makes the exit code 1; a sound file is healthy."""
from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import ggraph
from ggraph import dtypes, gguf, writer
from ggraph.quants import QUANTS
from ggraph.tools import _mixes
from ggraph.tools._scales import scan
from ggraph.tools.check import check, main, repair
from tests import tiny
from tests.tools.files import half, poke, wide

NAN, INF = half(np.nan), half(np.inf)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wide(tmp_path_factory.mktemp("check") / "sound.gguf", "Q6_K", general__file_type=18)


@pytest.fixture
def file(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(sound, tmp_path / "model.gguf"))


def bad(path: Path) -> list[dict[str, Any]]:
    """What the command finds, without notes; the exit code must be 1."""
    result = CliRunner().invoke(main, [str(path), "--json", "-q"])
    assert result.exit_code == 1, result.output + repr(result.exception)
    return [f for f in json.loads(result.stdout)["findings"] if f["severity"] != "note"]


def test_a_sound_file_is_healthy(file: Path) -> None:
    result = CliRunner().invoke(main, [str(file), "-q"])
    assert result.exit_code == 0, result.output
    assert ": healthy; 0 errors, 0 warnings" in result.stdout and "Q6_K" in result.stdout
    health = check(file)
    assert health.ok and health.label == "Q6_K" and health.types["Q6_K"] > health.types["F32"]


def test_nan_scale(file: Path) -> None:
    poke(file, "blk.1.ffn_down.weight", 5 * 210 + 208, NAN)
    found, = bad(file)
    assert (found["severity"], found["what"], found["tensor"], found["block"]) == ("error", "scale", "blk.1.ffn_down.weight", 5)
    assert "NaN scale d in block 5 (row 2, element 256)" in found["message"]


def test_infinite_scale(file: Path) -> None:
    for block in (3, 9):
        poke(file, "blk.0.attn_q.weight", block * 210 + 208, INF)
    found, = bad(file)
    assert (found["tensor"], found["block"]) == ("blk.0.attn_q.weight", 3)
    assert "infinite" in found["message"] and "and 1 more" in found["message"]


def test_values_without_scales(file: Path) -> None:
    poke(file, "output_norm.weight", 40, np.float32(np.nan).tobytes())
    found, = bad(file)
    assert (found["tensor"], found["block"]) == ("output_norm.weight", 10)


def test_zero_and_subnormal_scales_are_told(file: Path) -> None:
    name = "blk.0.attn_k.weight"
    poke(file, name, 208, half(0))
    poke(file, name, 2 * 210 + 208, half(3e-6))
    with gguf.File(file) as opened:
        d = np.abs(opened.tensors[name].data.reshape(-1, 210)[:, 208:].copy().view(np.float16))
    subnormal = np.flatnonzero((d > 0) & (d < np.finfo(np.float16).tiny))
    notes = {f.message.split()[2]: f for f in check(file).findings if f.tensor == name}
    assert notes["zero"].block == 0 and notes["subnormal"].block == subnormal[0]
    assert f"and {len(subnormal) - 1} more of 32" in notes["subnormal"].message
    for block in range(32):
        poke(file, name, block * 210 + 208, half(0))
    found, = bad(file)
    assert "all 32 blocks have scale d zero" in found["message"]


def test_wrong_label(tmp_path: Path) -> None:
    path = wide(tmp_path / "model.gguf", "Q6_K", general__file_type=15)
    found, = bad(path)
    assert found["what"] == "label" and "Q4_K_M is wrong: it is Q6_K" in found["message"] and found["tensor"].startswith("blk.0.")
    mended = tmp_path / "mended.gguf"
    assert [f.what for f in repair(path, mended)] == ["label"]
    assert check(mended).ok and check(mended).label == "Q6_K"


def test_single_tensors_of_another_type_are_told(sound: Path, tmp_path: Path) -> None:
    with gguf.File(sound) as file:
        tensors = list(file.tensors.values())
        kv = writer.raw_kv(file)
        with writer.replacing(tmp_path / "m.gguf") as out:
            made = writer.Writer(out, kv, [writer.Spec(t.name, t.ne, dtypes.F32 if t.name == "blk.1.attn_q.weight" else t.type)
                                           for t in tensors])
            for t in tensors:
                data = t.data if t.name != "blk.1.attn_q.weight" else np.zeros(4 * t.n_elements, np.uint8)
                made.write(data)
            made.finish()
    note = next(f for f in check(tmp_path / "m.gguf").findings if f.what == "label")
    assert note.severity == "note" and note.tensor == "blk.1.attn_q.weight" and "1 x F32" in note.message


def test_truncated_last_tensor(file: Path) -> None:
    with gguf.File(file) as opened:
        last = max(opened.tensors.values(), key=lambda t: t.offset)
    with file.open("r+b") as out:
        out.truncate(last.offset + last.nbytes // 2)
    found = bad(file)
    assert found[0]["tensor"] == last.name and "cut short" in found[0]["message"]
    assert {f["tensor"] for f in found} == {last.name}


def test_a_cut_header(file: Path) -> None:
    with file.open("r+b") as out:
        out.truncate(200)
    found, = bad(file)
    assert found["what"] == "file"


def test_missing_tokenizer(tmp_path: Path) -> None:
    found = bad(wide(tmp_path / "model.gguf", **{"tokenizer.ggml.model": None}))
    assert [(f["what"], f["key"]) for f in found] == [("tokenizer", "tokenizer.ggml.model")]


def twice(source: Path, target: Path, change: bool) -> None:
    """The first matrix once more at the end, perhaps with other bytes."""
    with gguf.File(source) as file:
        tensors = [*file.tensors.values(), file.tensors["blk.0.attn_q.weight"]]
        with writer.replacing(target) as out:
            made = writer.Writer(out, writer.raw_kv(file), [writer.spec(t) for t in tensors])
            for i, t in enumerate(tensors):
                made.write(t.data ^ np.uint8(change and i == len(tensors) - 1))
            made.finish()


@pytest.mark.parametrize("change", [False, True])
def test_duplicate_tensor(sound: Path, tmp_path: Path, change: bool) -> None:
    path, mended = tmp_path / "model.gguf", tmp_path / "mended.gguf"
    twice(sound, path, change)
    with pytest.raises(ggraph.GGUFError, match="two tensors"):
        gguf.File(path)
    found, = bad(path)
    assert found["tensor"] == "blk.0.attn_q.weight" and "two tensors" in found["message"]
    assert ("both are the same" in found["message"]) == (not change)
    result = CliRunner().invoke(main, [str(path), "-q", "--repair", str(mended)])
    assert ("mended 1" in result.stdout) == mended.exists() == (not change)
    if not change:
        assert check(mended).ok


def test_missing_and_unknown_tensors(sound: Path, tmp_path: Path) -> None:
    with gguf.File(sound) as file:
        kept = [t for t in file.tensors.values() if t.name not in ("blk.0.attn_k.weight", "blk.1.ffn_norm.weight")]
        with writer.replacing(tmp_path / "m.gguf") as out:
            specs = [*(writer.spec(t) for t in kept), writer.Spec("what.weight", (4,), dtypes.F32)]
            made = writer.Writer(out, writer.raw_kv(file), specs)
            for t in kept:
                made.write(t.data)
            made.write(np.zeros(16, np.uint8))
            made.finish()
    found = bad(tmp_path / "m.gguf")
    assert [f["tensor"] for f in found] == ["blk.0.attn_k.weight", "blk.1.ffn_norm.weight", "what.weight"]


@pytest.mark.parametrize("key, value, what", [
    ("tokenizer.ggml.eos_token_id", 99999, "tokenizer"),
    ("tokenizer.chat_template", "{{ nonesuch() }}", "template"),
    ("tokenizer.chat_template", "{{ bos_token }}{{ bos_token }}{{ messages[0].content }}", "template"),
    ("llama.context_length", 0, "context"),
    ("llama.rope.freq_base", -1.0, "rope"),
    ("llama.rope.scaling.type", "cubic", "rope"),
    ("llama.rope.dimension_count", 31, "rope"),
    ("general.architecture", "nonesuch", "architecture"),
    ("general.file_type", 777, "label")])
def test_bad_metadata(tmp_path: Path, key: str, value: Any, what: str) -> None:
    found = bad(tiny.write(tmp_path / "m.gguf", **{key.replace(".", "__"): value}))
    assert what in {f["what"] for f in found}
    assert key in {f["key"] for f in found}


def test_scaling_that_does_not_reach_the_context(tmp_path: Path) -> None:
    kv = {"llama.context_length": 4096, "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0,
          "llama.rope.scaling.original_context_length": 1024}
    found, = bad(tiny.write(tmp_path / "m.gguf", **kv))
    assert "reaches only 2048" in found["message"]


def test_an_answer_that_never_ends_is_mended(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ '<|im_start|>' + m.content + '<|im_start|>' }}{% endfor %}"
    path, mended = tiny.write(tmp_path / "m.gguf", tokenizer__chat_template=template), tmp_path / "mended.gguf"
    found, = bad(path)
    assert found["what"] == "template" and "<|im_start|>" in found["message"]
    assert [f.key for f in repair(path, mended)] == ["tokenizer.ggml.eot_token_id"]
    assert check(mended).ok


def test_bos_from_template_and_tokenizer_is_told(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", tokenizer__chat_template="{{ bos_token }}" + tiny.TEMPLATE)
    assert any("has it twice" in f.message for f in check(path).findings if f.severity == "note")


@pytest.mark.parametrize("dtype", [t for t in dtypes.TYPES.values() if t.quantized and t.name not in ("Q8_K", "Q8_1")],
                         ids=lambda t: t.name)
def test_every_type_shows_its_bad_scales(dtype: dtypes.DType, tmp_path: Path) -> None:
    """All bytes 0xFF: in every type that is a NaN of its scale."""
    blocks = np.zeros((8, dtype.nbytes), np.uint8)
    blocks[5] = 0xFF
    with writer.replacing(tmp_path / "m.gguf") as out:
        made = writer.Writer(out, {}, [writer.Spec("x", (dtype.block, 8), dtype)])
        made.write(blocks)
        made.finish()
    with gguf.File(tmp_path / "m.gguf") as file:
        found = scan(file.tensors["x"])
    names = {name for name, kind in found.n if kind == "NaN"}
    assert names and all(found.n[name, "NaN"] == 1 and found.first[name, "NaN"] == 5 for name in names)
    assert dtype in QUANTS


def test_labels_of_all_mixes_are_llama_cpps() -> None:
    assert len(_mixes.BY_ID) == len(_mixes.MIXES) and _mixes.mix("q4_k").name == "Q4_K_M"
    with pytest.raises(ggraph.Error, match="Q9"):
        _mixes.mix("Q9")


def test_real_models_are_healthy(smollm2: Path, gemma3: Path) -> None:
    for path, label in ((smollm2, "Q4_1"), (gemma3, "Q4_K_M")):
        health = check(path)
        assert health.ok and health.label == label
