"""docs/HOWTO-model.md shows the real file, and what it says of architectures from outside the package works as written."""
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ggraph.errors import ModelError
from ggraph.model import find_architecture
from tests import spec

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/HOWTO-model.md").read_text()
PYTHON, TOML = (re.findall(rf"```{kind}\n(.*?)```", PAGE, re.S) for kind in ("python", "toml"))
SHAPES = {"token_embd": [32, 64], "output_norm": [32], "output": [32, 64]} | {
    f"blk.{il}.{name}": shape for il in range(3) for name, shape in {
        "ffn_norm": [32], "attn_norm": [32], "ffn_up": [32, 48], "ffn_down": [48, 32], "attn_q": [32, 64], "attn_k": [32, 32],
        "attn_v": [32, 32], "attn_output": [64, 32]}.items()}
KV = {"context_length": 256, "embedding_length": 32, "block_count": 3, "feed_forward_length": 48, "attention.head_count": 4,
      "attention.head_count_kv": 2, "attention.key_length": 16, "attention.value_length": 16}
TEXT = [3, 14, 15, 9, 26, 5, 35]
RUN = """
import sys
import numpy as np
import ggraph
with ggraph.Model(sys.argv[1]) as model, ggraph.Context(model, n_ctx=256, n_threads=1) as ctx:
    batch = ggraph.Batch()
    for token in map(int, sys.argv[3:]):
        batch.add(token, None, 0, output=True)
    ctx.process("decode", batch)
    np.save(sys.argv[2], ctx.logits)
"""


def test_the_page_shows_the_real_file() -> None:
    code = (ROOT / "models/cohere2.py").read_text()
    shown = PYTHON[:3]
    assert all(part in code for part in shown)
    assert re.findall(r"^def (\w+)", code, re.M) == [m for part in shown for m in re.findall(r"^def (\w+)", part, re.M)]


def install(folder: Path, code: str = PYTHON[3], entry: str = TOML[0]) -> Path:
    """A distribution as pip leaves it: a module, and what importlib.metadata reads."""
    (folder / "toy.py").write_text(code)
    info = folder / "toy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    head, row = entry.splitlines()
    assert head == '[project.entry-points."ggraph.models"]'
    (info / "entry_points.txt").write_text("[ggraph.models]\n" + row.replace('"', ""))
    return folder


def write(path: Path) -> Path:
    keys = [[f"toy.{name}", "UINT32", value] for name, value in KV.items()]
    keys += [["toy.attention.layer_norm_rms_epsilon", "FLOAT32", 1e-5], ["tokenizer.ggml.model", "STRING", "none"],
             ["toy.vocab_size", "UINT32", 64]]
    return spec.write({"arch": "toy", "kv": keys, "tensors": [[f"{n}.weight", s, "F32"] for n, s in SHAPES.items()]}, path)


def logits() -> np.ndarray:
    """The same in NumPy."""
    w = {name: spec.weights(f"{name}.weight", shape).astype(np.float64) for name, shape in SHAPES.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        scaled: np.ndarray = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[name]
        return scaled
    x = w["token_embd"][TEXT]
    for il in range(3):
        p = f"blk.{il}."
        x = x + np.maximum(norm(x, p + "ffn_norm") @ w[p + "ffn_up"].T, 0) ** 2 @ w[p + "ffn_down"].T
        y = norm(x, p + "attn_norm")
        q, k, v = (np.repeat((y @ w[f"{p}attn_{i}"].T).reshape(len(TEXT), -1, 16), n, 1) for i, n in (("q", 1), ("k", 2), ("v", 2)))
        scores = np.einsum("qhd,khd->hqk", q, k) / 4 + np.where(np.tri(len(TEXT)) > 0, 0, -np.inf)
        e = np.exp(scores - scores.max(-1, keepdims=True))
        x = x + np.einsum("hqk,khd->qhd", e / e.sum(-1, keepdims=True), v).reshape(len(TEXT), -1) @ w[p + "attn_output"].T
    found: np.ndarray = norm(x, "output_norm") @ w["output"].T
    return found


def python(folder: Path, *args: object) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(folder), os.environ.get("PYTHONPATH", "")])
    return subprocess.run([sys.executable, *map(str, args)], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
                          timeout=300)


def test_an_architecture_from_outside(tmp_path: Path) -> None:
    install(tmp_path)
    r = python(tmp_path, "-c", RUN, write(tmp_path / "m.gguf"), tmp_path / "out.npy", *TEXT)
    assert r.returncode == 0, r.stderr
    got, want = np.load(tmp_path / "out.npy"), logits()
    assert ((got - want) ** 2).sum() <= 1e-5 * (want ** 2).sum()


@pytest.mark.parametrize(("code", "entry", "said"), [
    ("import nonesuch", TOML[0], "the plugin toy of architecture 'toy' cannot be loaded: No module named 'nonesuch'"),
    (PYTHON[3], TOML[0].replace("toy =", "other ="), "architecture 'toy' is not known; known ones: .*, other, ")])
def test_a_plugin_that_is_none(code: str, entry: str, said: str, tmp_path: Path) -> None:
    install(tmp_path, code, entry)
    r = python(tmp_path, "-c", RUN, write(tmp_path / "m.gguf"), tmp_path / "out.npy", *TEXT)
    assert r.returncode == 1 and re.search("ModelError: " + said, r.stderr)


def test_the_packages_own_come_first(tmp_path: Path) -> None:
    install(tmp_path, entry=TOML[0].replace("toy =", "llama ="))
    code = "from ggraph.model import find_architecture; print(find_architecture('llama').__name__)"
    assert python(tmp_path, "-c", code).stdout.split() == ["ggraph.models.llama"]


@pytest.mark.parametrize("name", ["os", "", "..model", "__init__"])
def test_what_is_no_architecture(name: str) -> None:
    with pytest.raises(ModelError, match="is not known"):
        find_architecture(name)
