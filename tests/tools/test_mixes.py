"""The types of each mix are those that llama.cpp gives, for 140 models of all architectures, with and without importance."""
from __future__ import annotations

import json
from pathlib import Path

import pytest

import ggraph
from ggraph import dtypes
from ggraph.tools import _mixes
from tests.tools import mixes

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "mixes.json").read_text())["digests"]
OUTLINES = {outline.name: outline for outline in mixes.outlines()}


def test_every_model_has_an_answer() -> None:
    assert GOLDEN.keys() == OUTLINES.keys()


@pytest.mark.parametrize("name", OUTLINES)
def test_types_are_llama_cpps(name: str) -> None:
    outline = OUTLINES[name]
    sizes = _mixes.Sizes.read(outline.values)
    types = {f"{mix.name} {importance}": {tensor: kind.name for tensor, kind in _mixes.choose(
        mix, outline.tensors, sizes, importance=importance).items()}
        for mix in _mixes.MIXES.values() for importance in (False, True)}
    assert mixes.digest(types) == GOLDEN[name]


def choose(mix: str, **wishes: object) -> dict[str, str]:
    outline = mixes.deep("llama", 8, 32, 8)
    wanted = _mixes.Wishes(**wishes)  # type: ignore[arg-type]
    return {name: kind.name for name, kind in _mixes.choose(_mixes.mix(mix), outline.tensors, _mixes.Sizes.read(outline.values),
                                                            wanted).items()}


def test_a_mix_by_hand() -> None:
    types = choose("q4_k_m")
    assert types["output.weight"] == "Q6_K" and types["token_embd.weight"] == "Q4_K" and types["output_norm.weight"] == "F32"
    assert [types[f"blk.{i}.ffn_down.weight"] for i in range(8)] == ["Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K"]


def test_wishes() -> None:
    assert set(choose("Q4_K_M", pure=True).values()) == {"Q4_K", "F32"}
    assert choose("Q4_K_M", leave_output=True)["output.weight"] == "F16"
    assert choose("Q4_K_M", output=dtypes.Q8_0)["output.weight"] == "Q8_0"
    assert choose("Q4_K_M", token_embedding=dtypes.Q2_K)["token_embd.weight"] == "Q2_K"
    types = choose("Q4_K_M", tensor_types=[(r"blk\.[0-3]\.ffn", dtypes.Q5_0), ("ffn_up", dtypes.Q2_K)])
    assert (types["blk.3.ffn_up.weight"], types["blk.4.ffn_up.weight"], types["blk.0.attn_norm.weight"]) == ("Q5_0", "Q2_K", "F32")


def test_names() -> None:
    assert _mixes.mix("q3_k").name == "Q3_K_M" and _mixes.mix("MXFP4").name == "MXFP4_MOE"
    with pytest.raises(ggraph.Error, match="there are F32"):
        _mixes.mix("Q9_K")
