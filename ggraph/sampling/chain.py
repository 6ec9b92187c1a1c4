"""In: a chain in words, rows of logits, accepted tokens. Out: token ids. Knows no model, no context, no text."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from types import NoneType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ggraph.errors import ArgumentError, SamplerError, Single, expect, flags, integer, texts
from ggraph.sampling import samplers
from ggraph.sampling.candidates import F32, NEG_INF, Candidates, f32
from ggraph.sampling.dry import Tails, Vocabulary, breaker_table
from ggraph.sampling.samplers import WORDS, Word
from ggraph.sampling.state import Random, State

_INT32 = (int, -(2**31), 2**31 - 1)
_MAX = float(np.finfo(f32).max)
_TINY = float(np.finfo(f32).tiny)
_FLOAT = (f32, -_MAX, _MAX)
# Argument name -> (type, lowest, highest); all others are _FLOAT.
_ARGUMENTS: dict[str, tuple[type, float, float]] = {
    "SEED": (int, -1, 2**32 - 1),
    "K": _INT32,
    "LAST_N": _INT32,
    "ALLOWED": _INT32,
    "M": (int, 1, 2**31 - 1),
    "MIN_KEEP": (int, 0, 2**31 - 1),
    "ID": (int, 0, 2**31 - 1),
    "BIAS": (f32, -math.inf, _MAX),
    "REPEAT": (f32, _TINY, _MAX),
}


@runtime_checkable
class Grammar(Protocol):
    """A constraint on the next token. The chain is run first; only where its token is refused is the mask made."""

    def accepts(self, token: int) -> bool:
        """Whether this token may come next. Changes nothing."""
        ...

    def mask(self) -> NDArray[np.bool_]:
        """[n_vocab]: which tokens may come next. Changes nothing."""
        ...

    def accept(self, token: int) -> None:
        """The token has been generated. (Prompt tokens are not shown to a grammar.)"""
        ...

    def clone(self) -> Grammar: ...

    def reset(self) -> None: ...


class Step(NamedTuple):
    word: Word
    args: tuple[Any, ...]
    state: State | None

    def run(self, c: Candidates) -> None:
        if self.state is None:
            self.word.apply(c, *self.args)
        else:
            self.word.apply(c, self.state, *self.args)


class Sampler(Single):
    """A chain of samplers, with its memory.

    `chain` is words with arguments, joined by ";": "top_k 40;top_p 0.95;min_p 0.05;temp 0.8;dist 42"; `describe()`
    lists the words. A chain that does not end in a word that picks ends in greedy. `vocab` is needed by dry only, whose
    repetitions end at the strings of `dry_breakers`. A bad chain raises SamplerError.

    `seed` is the seed in use, None where nothing is drawn: where the chain says -1, the fresh one that was taken, the
    same for all words. A chain with that number in place of -1 draws the same tokens. `reset` takes a new fresh one.
    """

    instead = "use clone()"

    def __init__(
        self,
        chain: str,
        n_vocab: int,
        vocab: Vocabulary | None = None,
        grammar: Grammar | None = None,
        dry_breakers: Sequence[str] = ("\n", ":", '"', "*"),
    ):
        expect("chain", chain, str, "words joined by \";\"")
        if integer("n_vocab", n_vocab) < 1:
            raise SamplerError(f"n_vocab is {n_vocab}; it must be at least 1")
        expect("vocab", vocab, (Vocabulary, NoneType), "a Vocab")
        expect("grammar", grammar, (Grammar, NoneType), "a Grammar; make one with Grammar.gbnf, .json_schema, .regex or .lark")
        self.chain = chain
        self.n_vocab = n_vocab
        self.grammar = grammar
        self.seed: int | None = None
        self._vocab = vocab
        self._dry_breakers = tuple(texts("dry_breakers", "a breaker of dry_breakers", dry_breakers))
        self._last: Candidates | None = None
        self._parsed = [(word, args) for word, args in _parse(chain, n_vocab) if not word.off(*args)]
        self._start()

    def _start(self) -> None:
        setup = _Setup(self._vocab, self._dry_breakers)
        self._steps = [Step(w, args, w.state(setup, *args) if w.state else None) for w, args in self._parsed]
        self.seed = setup.used

    def sample(self, logits: NDArray[Any]) -> int:
        """The next token for one row of logits [n_vocab], which is left as it is. `accept` must be told of it.

        SamplerError: a row of another shape, NaN or inf in it, no token left to choose.
        """
        try:
            row = np.asarray(logits, f32)
        except (TypeError, ValueError):
            raise ArgumentError("the row of logits is not a row of numbers") from None
        if row.shape != (self.n_vocab,):
            raise SamplerError(f"the row of logits has shape {row.shape}; this sampler takes ({self.n_vocab},)")
        token = self._run(row)
        if self.grammar is None or self.grammar.accepts(token):
            return token
        return self._run(np.where(self.grammar.mask(), row, NEG_INF))  # draws again: llama.cpp's seed goes on too

    def _run(self, row: F32) -> int:
        c = Candidates(row)
        c.best()  # raises where the row cannot be sampled from
        with np.errstate(all="ignore"):
            for step in self._steps:
                step.run(c)
        self._last = c
        return c.token(c.picked)

    def steps(self) -> list[tuple[str, float]] | None:
        """The chain as steps of `ops.sample`, which draw what `sample` draws but for rounding; None where it has other words, or a
        grammar. Their random numbers come from `uniform`."""
        found = [_PLAIN[s.word.apply](*s.args) for s in self._steps if s.word.apply in _PLAIN]
        whole = self.grammar is None and len(found) == len(self._steps) and all(found)
        return [step for step in found if step] if whole else None

    def uniform(self) -> float:
        """The next random number of a chain that ends in `dist`; 0 for one that draws none."""
        state = self._steps[-1].state
        return state.uniform() if isinstance(state, Random) else 0.0

    def ahead(self) -> float:
        """What `uniform` will return."""
        state = self._steps[-1].state
        return state.ahead() if isinstance(state, Random) else 0.0

    def drawn(self, n_top: int = 0) -> tuple[float, list[tuple[int, float]]]:
        """How probable the token of the last `sample` was among those that the chain left, and the likeliest of these, best first,
        with their probabilities; none of them is 0. Call it while that row of logits is still there."""
        c = self._last
        if c is None:
            raise SamplerError("nothing was sampled yet")
        if integer("n_top", n_top) < 0:
            raise SamplerError(f"n_top is {n_top}; it must be at least 0")
        p = c.softmax()
        top = np.argsort(-p, kind="stable")[:n_top]
        return float(p[c.picked]), [(c.token(int(i)), float(p[i])) for i in top if p[i] > 0]

    def accept(self, token: int, generated: bool = True) -> None:
        """The token has joined the text. A grammar is told only of generated tokens, not of a prompt's."""
        if generated is not True:
            flags(generated=generated)
        if not 0 <= integer("token", token) < self.n_vocab:
            raise SamplerError(f"token {token} is not in 0..{self.n_vocab - 1}")
        for step in self._steps:
            if step.state is not None:
                step.state.accept(token)
        if self.grammar is not None and generated:
            self.grammar.accept(token)

    def reset(self) -> None:
        """Forgets everything accepted and starts the draws over, as a new Sampler would."""
        self._start()
        if self.grammar is not None:
            self.grammar.reset()

    def clone(self) -> Sampler:
        """A twin in the same state; from here on the two are independent."""
        twin = object.__new__(Sampler)
        twin.__dict__.update(self.__dict__)
        twin._steps = [s._replace(state=s.state.clone() if s.state else None) for s in self._steps]
        twin.grammar = self.grammar.clone() if self.grammar is not None else None
        return twin


class _Setup:
    """What samplers need when they start: one seed for all that ask for a fresh one, and the breakers of dry."""

    def __init__(self, vocab: Vocabulary | None, dry_breakers: tuple[str, ...]):
        self.vocab = vocab
        self.dry_breakers = dry_breakers
        self.fresh = secrets.randbelow(2**32 - 1)
        self.used: int | None = None

    def seed(self, asked: int) -> int:
        self.used = self.fresh if asked in (-1, 2**32 - 1) else asked  # llama.cpp: -1 as an unsigned number
        return self.used

    def breakers(self) -> dict[int, Tails]:
        if self.vocab is None:
            raise SamplerError("dry needs the vocabulary to find its breakers: give Sampler(..., vocab=model.vocab)")
        return breaker_table(self.vocab, self.dry_breakers)


# What `ops.sample` can do; None for arguments with which it cannot.
_PLAIN: dict[Any, Callable[..., tuple[str, float] | None]] = {
    samplers.greedy: lambda: ("end", 0.0), samplers.dist: lambda seed: ("dist", 0.0),
    samplers.top_k: lambda k: ("top_k", float(k)), samplers.top_p: lambda p: ("top_p", float(p)),
    samplers.min_p: lambda p: ("min_p", float(p)), samplers.temp: lambda t: ("temp", float(t)),
    samplers.temp_ext: lambda t, delta, exponent: ("temp", float(t)) if delta <= 0 else None}


# --- the chain in words --------------------------------------------------------------------------


def describe() -> str:
    """The words of a chain, one a line, for help texts."""
    usages = {name: _usage(name) for name in WORDS}
    width = max(map(len, usages.values()))
    return "\n".join(f"{usage:{width}}  {WORDS[name].meaning}" for name, usage in usages.items())


def _known() -> str:
    return "known words: " + ", ".join(map(_usage, WORDS))


def _usage(name: str) -> str:
    return f"{name} {WORDS[name].usage}".strip()


def _parse(chain: str, n_vocab: int) -> Iterator[tuple[Word, tuple[Any, ...]]]:
    picker = ""
    for part in filter(None, map(str.strip, chain.split(";"))):
        name, *fields = part.split()
        if name not in WORDS:
            raise SamplerError(f"unknown sampler {name!r} in the chain {chain!r}; {_known()}")
        if picker:
            raise SamplerError(f"{picker} picks the token, so it must come last in the chain, not before {name}")
        yield WORDS[name], tuple(_arguments(name, fields, n_vocab))
        picker = name if WORDS[name].picks else ""
    if not picker:
        yield WORDS["greedy"], ()


def _arguments(name: str, fields: list[str], n_vocab: int) -> Iterator[Any]:
    wanted = WORDS[name].usage.split()
    if wanted[-1:] == ["..."]:
        wanted = wanted[:-1] * max(len(fields) // (len(wanted) - 1), 1)
    if not sum(not what.startswith("[") for what in wanted) <= len(fields) <= len(wanted):
        raise SamplerError(f"{name} takes {_usage(name)!r}, not {' '.join([name, *fields])!r}")
    for what, text in zip(wanted, fields):
        what = what.strip("[]")
        kind, low, high = _ARGUMENTS.get(what, _FLOAT)
        if what == "ID":
            high = n_vocab - 1
        try:
            value = int(text) if kind is int else float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            number = f"a whole number from {low} to {high}" if kind is int else "a finite number"
            number += " above 0" if low == _TINY else ""
            raise SamplerError(f"{name}: {what} must be {number}, not {text!r}, in {_usage(name)!r}")
        yield kind(value)
