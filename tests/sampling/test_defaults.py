"""The table of words, and the chain that llama.cpp's flags make."""
from __future__ import annotations

from typing import Any

import pytest

from ggraph.errors import SamplerError
from ggraph.sampling import DEFAULTS, Sampler, default_chain, describe
from ggraph.sampling.samplers import WORDS
from tests.sampling.rows import draw, some_rows


def test_describe_has_a_line_for_every_word() -> None:
    lines = describe().splitlines()
    assert [line.split()[0] for line in lines] == list(WORDS)
    assert all(len(line) <= 120 for line in lines)


def test_default_chain() -> None:
    assert default_chain(seed=3) == (
        "penalties 64 1.0 0.0 0.0;dry 0.0 1.75 2 64;top_n_sigma -1.0;top_k 40;typical 1.0;top_p 0.95;min_p 0.05;"
        "xtc 0.0 0.1 3;temp_ext 0.8 0.0 1.0;dist 3")
    rows = some_rows()
    same = Sampler("top_k 40;top_p 0.95;min_p 0.05;temp 0.8;dist 3", 60)
    assert draw(Sampler(default_chain(seed=3), 60), rows) == draw(same, rows)
    assert draw(Sampler(default_chain(temp=0), 60), rows) == rows.argmax(axis=1).tolist()


@pytest.mark.parametrize(("params", "chain"), [
    ({"samplers": "top-k;TEMP;typical;nucleus;minp", "seed": 1},
     "top_k 40;temp_ext 0.8 0.0 1.0;typical 1.0;top_p 0.95;min_p 0.05;dist 1"),
    ({"samplers": "adaptive_p;top_k", "adaptive_target": 0.5, "seed": 1}, "top_k 40;adaptive_p 0.5 0.9 1"),
    ({"samplers": "", "seed": 1}, "dist 1"),
    ({"mirostat": 1, "seed": 1}, "temp 0.8;mirostat 1 5.0 0.1 100"),
    ({"mirostat": 2, "temp": 0.5, "logit_bias": {7: -1.5, 3: float("-inf")}},
     "logit_bias 7 -1.5 3 -inf;temp 0.5;mirostat_v2 -1 5.0 0.1"),
])
def test_default_chain_from_flags(params: dict[str, Any], chain: str) -> None:
    assert default_chain(**params) == chain
    Sampler(chain, 60)


@pytest.mark.parametrize(("params", "says"), [
    ({"tmp": 1}, "tmp"), ({"mirostat": 3}, "mirostat"), ({"samplers": "top_k;infill"}, "infill")])
def test_default_chain_refuses(params: dict[str, Any], says: str) -> None:
    with pytest.raises(SamplerError, match=says):
        default_chain(**params)


@pytest.mark.parametrize("name", DEFAULTS)
def test_every_parameter_reaches_the_chain(name: str) -> None:
    other: dict[str, Any] = {"samplers": "top_k", "logit_bias": {1: 2.0}, "mirostat": 1}
    changed = {name: other.get(name, 7)}
    base: dict[str, Any] = {"mirostat": 1} if name.startswith("mirostat_") else (
        {"samplers": "adaptive_p"} if name.startswith("adaptive") else {})
    assert default_chain(**base | changed) != default_chain(**base)
