"""From the fields of a request to samplers, and back to the settings that answers repeat.

In: a checked `Sampling` body, the server's defaults. Out: `Settings`: a chain in words, a grammar, what answers say of it.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ggraph

from .problem import Problem
from .schema import Sampling

# Field of a request -> parameter of `ggraph.default_chain`, where they differ.
RENAMED = {"temperature": "temp", "dynatemp_exponent": "dynatemp_exp", "typical_p": "typical", "mirostat_tau": "mirostat_ent",
           "mirostat_eta": "mirostat_lr"}
FIELDS = ("seed", "temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p", "top_n_sigma",
          "xtc_probability", "xtc_threshold", "typical_p", "repeat_last_n", "repeat_penalty", "presence_penalty",
          "frequency_penalty", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "mirostat",
          "mirostat_tau", "mirostat_eta", "adaptive_target", "adaptive_decay", "min_keep")
LETTERS = {"e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p", "m": "min_p", "x": "xtc",
           "t": "temperature", "a": "adaptive_p"}
BREAKERS = ("\n", ":", '"', "*")


@dataclass(frozen=True)
class Thoughts:
    """How thoughts are marked, how many tokens each may have (-1: any number), and what is said before one is ended.
    `opened`: the text begins inside one."""
    start: str
    ends: tuple[str, ...]
    budget: int
    message: str = ""
    opened: bool = False

    def limited(self, vocab: ggraph.Vocab, grammar: ggraph.Grammar | None) -> ggraph.ReasoningBudget:
        return ggraph.ReasoningBudget(vocab, self.start, self.ends, self.budget, message=self.message, opened=self.opened,
                                      inner=grammar)


@dataclass
class Settings:
    """How one request is sampled. `params` are arguments of `ggraph.default_chain`, without the logit bias."""
    params: dict[str, Any]
    bias: dict[int, float]
    breakers: tuple[str, ...]
    body: Sampling
    grammar: ggraph.Grammar | None = None
    grammar_source: str = ""
    spec_types: list[str] = field(default_factory=list)
    thoughts: Thoughts | None = None
    preserved: frozenset[int] = frozenset()         # control tokens that are text

    def samplers(self, model: ggraph.Model, n: int) -> list[ggraph.Sampler]:
        """One for each choice; where a seed is given, the next choice has the next seed."""
        made = []
        for i in range(n):
            seed = self.params["seed"] if self.params["seed"] < 0 else (self.params["seed"] + i) % 2**32
            chain = ggraph.default_chain(**{**self.params, "seed": seed, "logit_bias": self.bias})
            try:
                made.append(ggraph.Sampler(chain, model.n_vocab, model.vocab, self._constraint(model.vocab), self.breakers))
            except ggraph.SamplerError as e:
                raise Problem(400, f"Failed to initialize samplers: {e}") from None
        return made

    def _constraint(self, vocab: ggraph.Vocab) -> ggraph.Grammar | ggraph.ReasoningBudget | None:
        grammar = self.grammar.clone() if self.grammar else None
        return self.thoughts.limited(vocab, grammar) if self.thoughts else grammar

    def described(self, stop: list[str], n_probs: int) -> dict[str, Any]:
        """`generation_settings` of native answers."""
        b, limit = self.body, self.body.limit
        values = {name: self.params[RENAMED.get(name, name)] for name in FIELDS}
        return {**values, "dry_sequence_breakers": list(self.breakers), "stop": stop, "max_tokens": limit, "n_predict": limit,
                "n_keep": b.n_keep, "n_discard": b.n_discard, "ignore_eos": b.ignore_eos, "stream": b.stream,
                "logit_bias": [{"token": t, "bias": v if v > float("-inf") else None} for t, v in self.bias.items()],
                "n_probs": n_probs, "grammar": self.grammar_source, "grammar_lazy": False, "grammar_triggers": [],
                "preserved_tokens": sorted(self.preserved), "chat_format": "Content-only", "reasoning_format": "deepseek",
                "reasoning_in_content": False, "generation_prompt": "", "samplers": self.params["samplers"].split(";"),
                "speculative.types": ",".join(self.spec_types) or "none", "timings_per_token": b.timings_per_token,
                "post_sampling_probs": b.post_sampling_probs, "backend_sampling": False, "lora": b.lora}


def settings(body: Sampling, defaults: Mapping[str, Any], model: ggraph.Model) -> Settings:
    """What a body asks for, over the server's defaults. A grammar that does not compile is a `Problem`."""
    params = {k: v for k, v in defaults.items() if k not in ("logit_bias", "breakers", "ignore_eos")}
    for name in FIELDS:
        if (value := getattr(body, name)) is not None:
            params[RENAMED.get(name, name)] = value
    if body.seed is not None:
        params["seed"] = -1 if body.seed < 0 else body.seed % 2**32
    if body.dry_base is not None and body.dry_base < 1:
        params["dry_base"] = defaults["dry_base"]
    if body.samplers is not None:
        params["samplers"] = _order(body.samplers)
    if body.grammar_lazy:
        raise Problem(400, "grammar_lazy is not supported: a grammar holds from the first token on")
    if body.dry_sequence_breakers == []:
        raise Problem(400, "Field 'dry_sequence_breakers': must be a non-empty array of strings")
    breakers = tuple(body.dry_sequence_breakers or defaults.get("breakers") or BREAKERS)
    bias = {**defaults.get("logit_bias", {}), **_biases(body.logit_bias, model)}
    if body.ignore_eos or defaults.get("ignore_eos"):
        bias |= dict.fromkeys(sorted(model.vocab.eog), float("-inf"))
    made = Settings(params, bias, breakers, body, preserved=controls(model.vocab, body.preserved_tokens))
    _constrain(made, model.vocab)
    return made


def controls(vocab: ggraph.Vocab, texts: Iterable[str]) -> frozenset[int]:
    """Those of the texts that are one control token each."""
    rows = [vocab.encode(text, add_special=False) for text in texts if text]
    return frozenset(ids[0] for ids in rows if len(ids) == 1 and vocab.is_control(ids[0]))


def _order(samplers: list[str] | str) -> str:
    """Names, or letters; unknown letters are left out, as the peer does."""
    return ";".join(samplers) if isinstance(samplers, list) else ";".join(LETTERS[c] for c in samplers if c in LETTERS)


def _biases(given: list[Any] | dict[str, Any] | None, model: ggraph.Model) -> dict[int, float]:
    """[[id or text, bias or false], ...] or {id or text: bias}; text stands for all of its tokens."""
    pairs = list(given.items()) if isinstance(given, dict) else given or []
    found: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise Problem(400, "Field 'logit_bias': must be an array of [token, bias] or an object")
        token, bias = pair
        if bias is False:
            bias = float("-inf")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or (abs(bias) > 1e30 and bias != float("-inf")):
            raise Problem(400, f"Field 'logit_bias': a bias must be a number or false, not {bias!r}")
        for id in _tokens(token, model, isinstance(given, dict)):
            found[id] = float(bias)
    return found


def _tokens(token: Any, model: ggraph.Model, numbers: bool) -> list[int]:
    if numbers and isinstance(token, str) and token.isdecimal() and len(token) < 10:
        token = int(token)
    if isinstance(token, str):
        return model.vocab.encode(token, add_special=False)
    if isinstance(token, bool) or not isinstance(token, int):
        raise Problem(400, f"Field 'logit_bias': a token must be an id or a text, not {token!r}")
    if not 0 <= token < model.n_vocab:
        raise Problem(400, f"Field 'logit_bias': there is no token {token}; the vocabulary has {model.n_vocab}")
    return [token]


def _constrain(made: Settings, vocab: ggraph.Vocab) -> None:
    body = made.body
    given = [name for name in ("grammar", "json_schema", "regex") if getattr(body, name) not in (None, "")]
    if not given:
        return
    if len(given) > 1:
        raise Problem(400, f"Cannot use both {given[0]} and {given[1]}")
    try:
        if body.grammar:
            made.grammar, made.grammar_source = ggraph.Grammar.gbnf(vocab, body.grammar), body.grammar
        elif body.regex:
            made.grammar = ggraph.Grammar.regex(vocab, body.regex)
        elif body.json_schema is not None:
            made.grammar = ggraph.Grammar.json_schema(vocab, body.json_schema or {"type": "object"})
    except ggraph.GrammarError as e:
        raise Problem(400, f"Failed to initialize samplers: {e}") from None
