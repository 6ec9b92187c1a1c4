"""Models that choose blocks to attend to: contexts in which that could leave some out are refused."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ggraph
from ggraph.errors import ModelError
from tests import spec


@pytest.mark.parametrize(("name", "overrides", "n"), [
    ("minimax-m3-moe", {"minimax-m3.attention.indexer.top_k": 64}, 256),                            # blocks of 4
    ("qwen4exp-moe", {"qwen4exp.attention.indexer.top_k": 256, "qwen4exp.attention.compress_ratios": 4}, 256)])
def test_what_could_leave_blocks_out_is_refused(name: str, overrides: dict[str, Any], n: int, tmp_path: Path) -> None:
    with ggraph.Model(spec.write(spec.specs()[name], tmp_path / "m.gguf"), kv_overrides=overrides) as model:
        with pytest.raises(ModelError, match=f"chooses blocks to attend to beyond {n} tokens.*n_ctx of at most {n}"):
            ggraph.Context(model, n_ctx=2 * n)
        ggraph.Context(model, n_ctx=n).close()


def test_without_flash_attention_all_blocks_are_seen(tmp_path: Path) -> None:
    """As in llama.cpp."""
    overrides = {"minimax-m3.attention.indexer.top_k": 1}
    with ggraph.Model(spec.write(spec.specs()["minimax-m3-moe"], tmp_path / "m.gguf"), kv_overrides=overrides) as model:
        ggraph.Context(model, n_ctx=512, flash_attn="off").close()
