"""ggraph-diff: damage is found and named whatever the settings, equal sides pass, a swap is what a file with that tensor does."""
from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import ggraph
from ggraph import gguf
from ggraph.tools import _diff_tables
from ggraph.tools import diff as command
from ggraph.tools._compare import Sums, worst
from ggraph.tools.diff import Limits, Side, diff
from tests import spec, tiny

TOKENS = [1, 262, 263, 264, 265, 266, 267, 268, 269, 270, 5, 6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a: quantized; f: not; bad: a with the scale of one block times 4; g: f with one other tensor."""
    made = tmp_path_factory.mktemp("diff")
    spec.write(tiny.tiny(), made / "a.gguf", "Q8_0")
    spec.write(tiny.tiny(), made / "f.gguf")
    damage(made / "a.gguf", made / "bad.gguf", "blk.1.ffn_up.weight", 37)
    delta = np.random.RandomState(1).standard_normal((tiny.N_FF, tiny.N_EMBD)).astype(np.float32) * np.float32(0.05)
    spec.write(tiny.tiny(), made / "g.gguf", deltas={"blk.0.ffn_gate.weight": delta})
    return made


def damage(path: Path, to: Path, tensor: str, block: int) -> None:
    """Multiply the scale of one Q8_0 block by 4."""
    shutil.copy(path, to)
    with gguf.File(path) as file:
        t = file.tensors[tensor]
        raw = np.memmap(to, np.uint8, "r+")
        scale = raw[t.offset + block * t.type.nbytes:][:2].view(np.float16)
        scale *= np.float16(4)
        raw.flush()


def sides(folder: Path, a: str, b: str, **settings: tuple[Any, Any]) -> tuple[Side, Side]:
    return (Side(str(folder / a), **{k: v[0] for k, v in settings.items()}),
            Side(str(folder / b), **{k: v[1] for k, v in settings.items()}))


SETTINGS = {"files": {}, "backends": {"backend": ("ref", "cpu")}, "flash attention": {"flash_attn": ("on", "off")},
            "threads": {"n_threads": (1, 2)}}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_damaged_block_is_named(folder: Path, settings: dict[str, tuple[Any, Any]]) -> None:
    found = diff(*sides(folder, "a.gguf", "bad.gguf", **settings), TOKENS, n_swap=0)
    assert not found.passed
    assert [f.where for f in found.failures if f.what == "block"] == ["blk.1.ffn_up.weight"]
    assert "block 37 (row 18)" in found.failures[0].text
    assert [t.name for t in found.tensors if not t.same] == ["blk.1.ffn_up.weight"]
    assert max(found.nodes, key=lambda n: n.channel_nmse).name == "ffn_up-1", "the node that reads it adds the error"
    assert max(found.nodes, key=lambda n: n.channel_nmse).channel == 18


@pytest.mark.parametrize("settings", [s for s in SETTINGS.values() if s], ids=[k for k, s in SETTINGS.items() if s])
def test_a_file_and_itself_pass(folder: Path, settings: dict[str, tuple[Any, Any]]) -> None:
    found = diff(*sides(folder, "a.gguf", "a.gguf", **settings), TOKENS)
    assert found.passed and not found.tensors and not found.swaps and found.kld < 1e-3
    assert found.nodes and max(n.local_nmse for n in found.nodes) < 1e-3


def test_a_quantized_cache_leaves_comparable_nodes(folder: Path) -> None:
    found = diff(*sides(folder, "a.gguf", "a.gguf", type_k=("f16", "q8_0"), type_v=("f16", "q8_0")), TOKENS)
    assert found.passed and max(n.local_nmse for n in found.nodes) < 1e-2


def test_a_swap_is_what_the_tensor_does(folder: Path) -> None:
    """g is f with one other tensor: swapping that one into f gives g, found without writing a file."""
    found = diff(*sides(folder, "f.gguf", "g.gguf"), TOKENS)
    assert [s.tensor for s in found.swaps] == ["blk.0.ffn_gate.weight"] and found.swaps[0].node == "ffn_gate-0"
    assert found.kld > 1e-4 and abs(found.swaps[0].kld - found.kld) < 1e-3 * found.kld
    assert found.first == "ffn_gate-0", "all before it is equal"
    before = found.nodes[:[n.name for n in found.nodes].index("ffn_gate-0")]
    assert before and all(n.nmse == 0 for n in before)
    later = [n for n in found.nodes if n.layer == 1]
    assert all(n.nmse > 0 for n in later) and all(n.local_nmse == 0 for n in later), "what comes later adds nothing"


def test_quantization_as_a_whole(folder: Path) -> None:
    found = diff(*sides(folder, "f.gguf", "a.gguf"), TOKENS, n_swap=-1)
    quantized = {t.name for t in found.tensors if t.type_b == "Q8_0"}
    assert quantized and {t.name for t in found.tensors if not t.same} == quantized
    assert {s.tensor for s in found.swaps} == quantized and all(s.type_a == "F32" for s in found.swaps)
    assert len(found.positions) == len(TOKENS) and all(0 < sum(p for _, _, p, _ in x.top) <= 1.0001 for x in found.positions)
    assert found.passed and not diff(*sides(folder, "f.gguf", "a.gguf"), TOKENS, limits=Limits(nmse=1e-9), n_swap=0).passed


def test_sums_and_the_worst_of_them() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, 7, 5))
    sums = Sums()
    sums.add(a[:3], b[:3])
    sums.add(a[3:], b[3:])
    assert sums.nmse == pytest.approx(((a - b)**2).sum() / (a**2).sum())
    assert sums.cosine == pytest.approx((a * b).sum() / np.sqrt((a**2).sum() * (b**2).sum()))
    assert sums.max_abs == np.abs(a - b).max()
    ratio = ((a - b)**2).sum(0) / (a**2).sum(0)
    channel, value = sums.worst()
    assert channel == int(ratio.argmax()) and value == pytest.approx(ratio.max())
    assert worst(np.array([1.0, 0.0]), np.array([0.5, 0.001])) == (0, 0.5), "next to no energy counts as little"
    masked = Sums()
    masked.add(np.array([[1.0, -np.inf]]), np.array([[1.0, -np.inf]]))
    assert masked.nmse == 0
    masked.add(np.array([[1.0, 2.0]]), np.array([[1.0, np.nan]]))
    assert masked.nmse > 1e100


def invoke(*args: str) -> Result:
    return CliRunner().invoke(command.main, [*args, "-q"])


def test_command(folder: Path, tmp_path: Path) -> None:
    a, bad = str(folder / "a.gguf"), str(folder / "bad.gguf")
    done = invoke(a, bad, "-p", "the rain", "--html", str(tmp_path / "d.html"))
    assert done.exit_code == 1 and "tensor blk.1.ffn_up.weight is off" in done.stdout
    text = (tmp_path / "d.html").read_text()
    assert text.count("<svg") >= 4 and not re.search(r"""(src|href)=["']?(http|//)|@import""", text)
    assert "var(--s5)" in text and "Error by layer" in text and "KL divergence, nats" in text
    done = invoke(a, "--backend", "ref,cpu", "-p", "the rain", "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["passed"] is True
    assert invoke(a, bad, "-p", "the rain", "--max-block", "1e9").exit_code == 0


@pytest.mark.parametrize(("args", "told", "code"), [
    ((), "both sides are the same", 2), (("-fa", "on,of"), "is not one value or two", 2), (("-t", "x"), "are not numbers", 2),
    (("--backend", "ref,none"), "backend is 'none'; it must be one of", 1)])
def test_what_is_wrong_is_told(folder: Path, args: tuple[str, ...], told: str, code: int) -> None:
    done = invoke(str(folder / "a.gguf"), *args)
    assert done.exit_code == code and told in done.stderr, done.stderr


def test_files_of_two_models(folder: Path, tmp_path: Path) -> None:
    other = spec.write(spec.specs()["llama-dense-b"], tmp_path / "o.gguf")
    with pytest.raises(ggraph.Error, match="not two files of one model"):
        diff(Side(str(folder / "a.gguf")), Side(str(other)), TOKENS)


def test_an_error_of_the_first_side_is_told(folder: Path) -> None:
    with pytest.raises(ggraph.BatchError, match="the vocabulary has ids"):
        diff(*sides(folder, "a.gguf", "bad.gguf"), [99999])


@pytest.mark.parametrize("width", [132, 80, 60, 40, 24])
def test_the_tables_fit_the_terminal(folder: Path, width: int, monkeypatch: pytest.MonkeyPatch,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    found = diff(*sides(folder, "f.gguf", "a.gguf"), TOKENS, n_swap=2)
    monkeypatch.setattr(_diff_tables, "WIDTH", width)
    _diff_tables.show(found, 3)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width and not any("…" in line for line in lines)
    names = [s.tensor for s in found.swaps] + [n.name for n in sorted(found.nodes, key=lambda n: -n.local_nmse)[:3]]
    assert all(any(name in line for line in lines) for name in names)
    text = " ".join(lines)
    assert ("no room for" in text) == (width < 80) and ("worst block" in text)
