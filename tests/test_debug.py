"""GGRAPH_DEBUG: each level shows what it promises, on standard error, and changes no result."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ggraph
from tests import spec


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spec.write(spec.specs()["llama-dense-b"], tmp_path_factory.mktemp("debug") / "m.gguf")


def run(path: Path) -> np.ndarray:
    with ggraph.Model(path) as model, ggraph.Context(model, n_ctx=256) as ctx:
        batch = ggraph.Batch()
        batch.add(5, None, 0, output=True)
        ctx.process("decode", batch)
        return np.array(ctx.logits)


SHOWN = {0: (), 1: ("context on",), 2: ("context on", " us  ", "GB/s", "steps"), 3: ("split 0:", "attn_norm-0 = "),
         4: ("Qcur-1 [", "mean", "l_out-0")}


@pytest.mark.parametrize("level", SHOWN)
def test_each_level_shows_its_part(level: int, path: Path, monkeypatch: pytest.MonkeyPatch,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    plain = run(path)
    capsys.readouterr()
    monkeypatch.setenv("GGRAPH_DEBUG", str(level))
    logits = run(path)
    out, err = capsys.readouterr()
    assert out == "" and all(part in err for part in SHOWN[level]), err[:500]
    assert ("context on" in err) == (level >= 1) and ("split 0" in err) == (level >= 3) and ("mean" in err) == (level >= 4)
    assert np.allclose(logits, plain, rtol=1e-3, atol=1e-4)


def test_what_a_product_reads_is_counted_where_it_ends(path: Path, monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    """Not where its activations are prepared, in a step before, which would read at thousands of GB/s."""
    monkeypatch.setenv("GGRAPH_DEBUG", "2")
    run(path)
    steps = [line for line in capsys.readouterr().err.splitlines() if " us  " in line and " steps" not in line]
    products = [word for line in steps for word in line.split(" us  ")[1].split(" + ") if word.startswith("mul_mat ")]
    assert products and len(products) == len({p.split()[1] for p in products})
    assert all("mul_mat" in line for line in steps if "GB/s" in line)
