"""docs/HOWTO-hooks.md works as written."""
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggraph.models.llama as llama
from tests import tiny

PAGE = (Path(__file__).parents[1] / "docs/HOWTO-hooks.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def test_its_blocks_run_one_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, original = tiny.write(tmp_path / "tiny.gguf"), llama.graph
    names: dict[str, Any] = {}
    said = []
    for block in BLOCKS:
        exec(compile(block.replace('"smollm2"', repr(str(file))), "HOWTO-hooks.md", "exec"), names)
        said.append(capsys.readouterr().out)
    assert "attn_norm-0 mul F32" in said[0]
    assert set(names["norms"]) == {"l_out-0", "l_out-1"} and all(np.isfinite(x) for x in names["norms"].values())
    plain = said[1].partition(" {")[0]
    changed, stopped = said[2].rstrip().rsplit("\n", 1)
    assert changed != plain and stopped == "a hook stopped the step at l_out-0"
    assert re.match(r"decode \w+ [\d.]+ ms \[", said[3])
    assert said[4].rstrip("\n") != plain and llama.graph is original
