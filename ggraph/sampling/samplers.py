"""In: candidates, a sampler's memory, its arguments. Out: fewer or changed candidates, or one picked. A function each.

The rules, their order of operations and their odd corners are llama.cpp's (src/llama-sampler.cpp). The vocabulary is
sorted as a whole only where llama.cpp defines a sampler on the sorted whole (typical, xtc, temp_ext with DELTA, both
mirostats) and nothing before it in the chain has cut the candidates down. NumPy's floating-point warnings are off here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ggraph.sampling.candidates import F32, NEG_INF, Candidates, f32, log, log2, total
from ggraph.sampling.dry import Dry, Tails, dry
from ggraph.sampling.order import ascending
from ggraph.sampling.state import Random, State, Surprise, Target, Window

# --- picks one -----------------------------------------------------------------------------------


def greedy(c: Candidates) -> None:
    c.picked = c.best()


def dist(c: Candidates, rng: Random, seed: int) -> None:
    u = rng.uniform()  # drawn for a single candidate too
    reached = np.cumsum(c.weights(), dtype=np.float64)
    c.picked = min(int(np.searchsorted(reached, u * reached[-1])), len(c) - 1)


def mirostat(c: Candidates, state: Surprise, seed: int, tau: f32, eta: f32, m: int) -> None:
    c.sort()
    c.sort(_mirostat_k(c.softmax(), state.mu, m, c.n_vocab))
    _pick_and_learn(c, state, tau, eta)


def _mirostat_k(p: F32, mu: f32, m: int, n_vocab: int) -> int:
    """How many tokens to keep, from the Zipf exponent that the m most likely ones show."""
    n = min(m, len(p)) - 1
    rank = np.arange(1, n + 1, dtype=f32)
    t, b = log((rank + f32(1)) / rank), log(p[:n] / p[1 : n + 1])
    s_hat = total(t * b) / total(t * t)
    epsilon = s_hat - f32(1)
    k = _pow(epsilon * _pow(f32(2), mu) / (f32(1) - _pow(f32(n_vocab), -epsilon)), f32(1) / s_hat)
    return int(k) if 1 <= k < 2**31 else 1  # NaN and overflow give 1


def mirostat_v2(c: Candidates, state: Surprise, seed: int, tau: f32, eta: f32) -> None:
    c.sort()
    too_rare = -log2(c.softmax()) > state.mu
    c.sort(max(int(too_rare.argmax()), 1) if too_rare.any() else None)
    _pick_and_learn(c, state, tau, eta)


def _pick_and_learn(c: Candidates, state: Surprise, tau: f32, eta: f32) -> None:
    p = c.softmax()
    c.picked = _discrete(p, state)
    state.mu = state.mu - eta * (-log2(p[c.picked]) - tau)


def adaptive_p(c: Candidates, state: Target, target: f32, decay: f32, seed: int) -> None:
    p = c.softmax()
    if target < 0:
        c.picked = _discrete(p, state)
        return
    wanted = _clamp(f32(2) * _clamp(target) - state.sum / state.weight)
    d = np.abs((p - wanted) * (f32(1) / f32(0.3)))
    c.replace(np.where(c.logits == NEG_INF, NEG_INF, f32(5) - f32(10) * d * d / (f32(1) + d)))
    c.picked = _discrete(c.softmax(), state)
    state.pending = c.token(c.picked), p[c.picked]


def _clamp(x: f32) -> f32:
    return min(max(x, f32(0)), f32(1))


def _pow(base: f32, exponent: f32) -> f32:
    power: f32 = np.power(base, exponent, dtype=np.float64).astype(f32)
    return power


def _discrete(p: F32, rng: Random) -> int:
    """std::discrete_distribution<int>, which draws no number where there is nothing to choose."""
    if len(p) < 2:
        return 0
    p64 = p.astype(np.float64)
    reached = np.cumsum(p64 / np.cumsum(p64)[-1])
    reached[-1] = 1.0
    return int(np.searchsorted(reached, rng.uniform()))


# --- cuts the candidates down --------------------------------------------------------------------


def top_k(c: Candidates, k: int) -> None:
    c.sort(k)


def top_p(c: Candidates, p: f32, min_keep: int = 0) -> None:
    prob = c.softmax()  # summed in the order from before the sort
    for k in (256, len(c)) if len(c) > 1024 and not c.is_sorted else (len(c),):
        order = c.order(k)
        reached = np.add.accumulate(prob[order])
        if reached[-1] >= p and k >= min_keep:
            break
    c.keep(order[: max(int(np.searchsorted(reached, p)) + 1, min_keep)])
    c.is_sorted = True


def min_p(c: Candidates, p: f32, min_keep: int = 0) -> None:
    best = c.best()
    likely = np.flatnonzero(c.logits >= c.logits[best] + log(p))
    if len(likely) < min_keep:
        c.sort(min_keep)
    else:
        c.keep(likely if len(likely) else np.array([best]))     # P above 1


def typical(c: Candidates, p: f32, min_keep: int = 0) -> None:
    c.sort()
    prob = c.softmax()
    surprise = -log(prob)
    entropy = total(prob * surprise)  # NaN where a probability is 0: llama.cpp then sorts equals; so does `ascending`
    order = ascending(np.abs(surprise - entropy))
    reached = np.add.accumulate(prob[order])
    c.keep(order[: max(int(np.searchsorted(reached, p, side="right")) + 1, min_keep)])
    c.is_sorted = False


def top_n_sigma(c: Candidates, n: f32) -> None:
    if len(c) < 2:
        return
    finite = c.logits[c.logits != NEG_INF]
    mean = total(finite) / f32(len(finite))
    deviation = np.sqrt(total((finite - mean) ** 2) / f32(len(finite)))
    lowest = c.logits[c.best()] - n * deviation
    logits = c.writable()
    logits[logits < lowest] = NEG_INF


def xtc(c: Candidates, rng: Random, p: f32, threshold: f32, seed: int, min_keep: int = 0) -> None:
    if len(c) < 2 or rng.uniform_f32() > p:
        return
    c.sort()
    prob = c.softmax()
    n_above = int(((prob >= threshold) & (prob > 0)).sum())  # > 0: llama.cpp takes a banned token where THRESHOLD is 0
    if n_above > 1 and len(c) - (n_above - 1) >= min_keep:
        c.keep(np.arange(n_above - 1, len(c)))  # all above the threshold go, but for the least likely of them


# --- changes the logits --------------------------------------------------------------------------


def temp(c: Candidates, t: f32) -> None:
    if t > 0:
        logits = c.writable()
        logits /= t
    else:
        c.keep(np.array([c.best()]))  # llama.cpp sets the others to -inf, which no later sampler brings back


def temp_ext(c: Candidates, t: f32, delta: f32, exponent: f32) -> None:
    if delta <= 0:
        temp(c, t)
    elif len(c) > 1:
        c.sort()
        prob = c.softmax()
        prob = prob[prob > 0]
        entropy = total(-(prob * log(prob))) / -log(f32(1) / f32(len(c)))
        low, high = max(f32(0), t - delta), t + delta
        t = low + (high - low) * _pow(entropy, exponent)
        logits = c.writable()
        if t > 0:
            logits /= t
        else:
            logits[1:] = NEG_INF  # none is cut: how many there are decides whether adaptive_p and mirostat draw


def penalties(c: Candidates, window: Window, last_n: int, repeat: f32, freq: f32, present: f32) -> None:
    logits, at = c.writable(), c.find(window.counts)
    count = np.array([window.counts[t] for t in c.tokens(at)], f32)
    x = logits[at]
    logits[at] = np.where(x <= 0, x * repeat, x / repeat) - (count * freq + present)
    c.is_sorted = False


def logit_bias(c: Candidates, *pairs: Any) -> None:
    bias: dict[int, f32] = {}
    for token, b in zip(pairs[::2], pairs[1::2], strict=True):
        bias[token] = bias.get(token, f32(0)) + b
    logits, at = c.writable(), c.find(bias)
    logits[at] += np.array([bias[t] for t in c.tokens(at)], f32)
    c.is_sorted = False


# --- the table -----------------------------------------------------------------------------------


class Setup(Protocol):
    """What the memory of a sampler may need when it is made."""

    def seed(self, asked: int) -> int:
        """The seed to use: a fresh one for -1, the same for the whole chain."""
        ...

    def breakers(self) -> dict[int, Tails]: ...


@dataclass(frozen=True)
class Word:
    """One row of the table: with its function it is a sampler.

    `usage` names the arguments, whose types and bounds chain.py knows; "..." repeats them, one in brackets may be left
    out. `off` tells from the arguments that the sampler would do nothing: it is left out. `state` makes its memory,
    which `apply` then gets before the arguments. `picks` says that it chooses the token, so that nothing may follow it.
    """

    apply: Callable[..., None]
    usage: str
    meaning: str
    off: Callable[..., bool] = lambda *args: False
    state: Callable[..., State] | None = None
    picks: bool = False


def _random(setup: Setup, *args: Any) -> State:
    """For samplers whose last argument is the seed."""
    return Random(setup.seed(args[-1]))


WORDS = {
    "greedy": Word(greedy, "", "pick the most likely token", picks=True),
    "dist": Word(dist, "SEED", "draw a token by its probability; SEED -1: a fresh seed", state=_random, picks=True),
    "mirostat": Word(
        mirostat,
        "SEED TAU ETA M",
        "draw, holding the surprise near TAU bits; rate ETA, estimated from M tokens",
        state=lambda setup, seed, tau, eta, m: Surprise(setup.seed(seed), tau),
        picks=True,
    ),
    "mirostat_v2": Word(
        mirostat_v2,
        "SEED TAU ETA",
        "draw, holding the surprise near TAU bits; learning rate ETA",
        state=lambda setup, seed, tau, eta: Surprise(setup.seed(seed), tau),
        picks=True,
    ),
    "adaptive_p": Word(
        adaptive_p,
        "TARGET DECAY SEED",
        "draw, holding the probability near TARGET on average; TARGET < 0: like dist",
        state=lambda setup, target, decay, seed: Target(setup.seed(seed), target, decay),
        picks=True,
    ),
    "top_k": Word(top_k, "K", "keep the K most likely; K <= 0: off", off=lambda k: k <= 0),
    "top_p": Word(
        top_p, "P [MIN_KEEP]", "keep the most likely that reach P together; P >= 1: off", off=lambda p, *_: p >= 1
    ),
    "min_p": Word(
        min_p, "P [MIN_KEEP]", "keep those at least P times as likely as the best; P <= 0: off", off=lambda p, *_: p <= 0
    ),
    "typical": Word(
        typical, "P [MIN_KEEP]", "keep those of the most usual surprise that reach P together; P >= 1: off",
        off=lambda p, *_: p >= 1,
    ),
    "top_n_sigma": Word(
        top_n_sigma, "N", "ban logits more than N standard deviations below the best; N <= 0: off", off=lambda n: n <= 0
    ),
    "xtc": Word(
        xtc,
        "P THRESHOLD SEED [MIN_KEEP]",
        "with chance P drop those above THRESHOLD but the last of them; P <= 0: off",
        off=lambda p, threshold, *_: p <= 0 or threshold > f32(0.5),
        state=lambda setup, p, threshold, seed, *_: Random(setup.seed(seed)),
    ),
    "temp": Word(temp, "T", "divide the logits by T; T <= 0: keep only the best", off=lambda t: t == 1),
    "temp_ext": Word(
        temp_ext,
        "T DELTA EXPONENT",
        "temperature T -+ DELTA by the entropy of the candidates to the EXPONENT",
        off=lambda t, delta, exponent: t == 1 and delta <= 0,
    ),
    "penalties": Word(
        penalties,
        "LAST_N REPEAT FREQ PRESENT",
        "lower the LAST_N accepted tokens: by a factor, per use, once",
        off=lambda last_n, repeat, freq, present: last_n <= 0 or (repeat == 1 and freq == 0 and present == 0),
        state=lambda setup, last_n, *_: Window(last_n),
    ),
    "dry": Word(
        dry,
        "MULT BASE ALLOWED LAST_N",
        "lower what lengthens a repeat of n >= ALLOWED by MULT * BASE ** (n - ALLOWED)",
        off=lambda mult, base, allowed, last_n: mult == 0 or base < 1 or last_n <= 0,
        state=lambda setup, mult, base, allowed, last_n: Dry(last_n, setup.breakers()),
    ),
    "logit_bias": Word(logit_bias, "ID BIAS ...", "add BIAS to the logit of token ID; -inf bans it"),
}
