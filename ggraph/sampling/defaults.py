"""In: sampling parameters under the names of llama.cpp's flags. Out: the chain in words that llama.cpp would build."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from ggraph.errors import SamplerError, expect, integer

# Flag -> llama.cpp's default. `logit_bias` maps token ids to what is added to their logits.
DEFAULTS: dict[str, Any] = {
    "samplers": "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature",
    "seed": -1,
    "temp": 0.8,
    "dynatemp_range": 0.0,
    "dynatemp_exp": 1.0,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "typical": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "repeat_last_n": 64,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": 64,
    "mirostat": 0,
    "mirostat_lr": 0.1,
    "mirostat_ent": 5.0,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.9,
    "min_keep": 0,
    "logit_bias": {},
}

# llama.cpp's name of a sampler -> words of the chain.
_SAMPLERS = {
    "penalties": "penalties {repeat_last_n} {repeat_penalty} {frequency_penalty} {presence_penalty}",
    "dry": "dry {dry_multiplier} {dry_base} {dry_allowed_length} {dry_penalty_last_n}",
    "top_n_sigma": "top_n_sigma {top_n_sigma}",
    "top_k": "top_k {top_k}",
    "typ_p": "typical {typical}{keep}",
    "top_p": "top_p {top_p}{keep}",
    "min_p": "min_p {min_p}{keep}",
    "xtc": "xtc {xtc_probability} {xtc_threshold} {seed}{keep}",
    "temperature": "temp_ext {temp} {dynatemp_range} {dynatemp_exp}",
    "adaptive_p": "adaptive_p {adaptive_target} {adaptive_decay} {seed}",
}
_ALIASES = {"temp": "temperature", "typical": "typ_p", "typical_p": "typ_p", "typ": "typ_p", "nucleus": "top_p"}
_ALIASES |= {name.replace("_", ""): name for name in _SAMPLERS}
_MIROSTAT = {
    1: "temp {temp};mirostat {seed} {mirostat_ent} {mirostat_lr} 100",
    2: "temp {temp};mirostat_v2 {seed} {mirostat_ent} {mirostat_lr}",
}


def default_chain(**params: Any) -> str:
    """The chain for these parameters (names and defaults: `DEFAULTS`), in llama.cpp's order.

    logit_bias comes first. `samplers` gives the order of the others; adaptive_p, if listed, picks, else dist does.
    mirostat 1 or 2 takes the place of all but logit_bias. A `temp` of 0 or less keeps the likeliest token alone.
    """
    unknown = params.keys() - DEFAULTS.keys()
    if unknown:
        raise SamplerError(f"unknown sampling parameter {min(unknown)!r}; known: {', '.join(DEFAULTS)}")
    p = DEFAULTS | params
    expect("samplers", p["samplers"], str, "names of samplers, joined by \";\"")
    expect("logit_bias", p["logit_bias"], Mapping, "a mapping of token ids to what is added")
    for name, value in params.items():          # whether it is a number that makes sense, the chain tells
        if name not in ("samplers", "logit_bias"):
            expect(name, value, Real, "a number")
    if p["mirostat"] not in (0, *_MIROSTAT):
        raise SamplerError(f"mirostat must be 0, 1 or 2, not {p['mirostat']!r}")
    p["keep"] = f" {p['min_keep']}" if p["min_keep"] else ""
    words = _MIROSTAT[p["mirostat"]] if p["mirostat"] else _ordered(p["samplers"])
    return ";".join([*_bias(p["logit_bias"]), words.format_map(p)])


def _bias(bias: Mapping[int, float]) -> list[str]:
    for token, b in bias.items():
        expect(f"logit_bias[{integer('a token of logit_bias', token)}]", b, Real, "a number")
    return ["logit_bias " + " ".join(f"{token} {b}" for token, b in bias.items())] if bias else []


def _ordered(samplers: str) -> str:
    names = [_canonical(name) for name in filter(None, map(str.strip, samplers.split(";")))]
    picker = _SAMPLERS["adaptive_p"] if "adaptive_p" in names else "dist {seed}"
    return ";".join([*(_SAMPLERS[name] for name in names if name != "adaptive_p"), picker])


def _canonical(name: str) -> str:
    plain = name.lower().replace("-", "_")
    plain = _ALIASES.get(plain, plain)
    if plain not in _SAMPLERS:
        raise SamplerError(f"unknown sampler {name!r}; known: {', '.join(_SAMPLERS)}")
    return plain
