"""From what was counted for each token to what is reported: means with errors, percentiles, perplexities.

The formulas are those of llama.cpp's perplexity tool: an error is the standard error of the mean, of functions of means to first
order.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]


class Estimate(NamedTuple):
    """A value and its standard error (nan where there are too few tokens)."""
    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.6f} ± {self.error:.6f}"


@dataclass(frozen=True)
class Perplexity:
    """e to the mean negative log-likelihood of `n_tokens` tokens; `running`: the estimate after each window, with its error."""
    method: str
    ppl: Estimate
    n_tokens: int
    n_ctx: int
    n_chunks: int
    running: tuple[float, ...]
    running_error: tuple[float, ...]

    def json(self) -> dict[str, Any]:
        return _json(self)


@dataclass(frozen=True)
class Divergence:
    """How far the predictions of a model are from those of its base, over `n_tokens` tokens.

    `kld`: Kullback-Leibler divergence from the base, in nats. `delta_p`: change of the probability of the text's own token,
    with its root mean square. `same_top`: share of rows where both find the same token likeliest. `*_at`: percentiles by name,
    "50" is the median. The `*_values` are float64 [n_tokens], in the order of the text.
    """
    ppl: Estimate
    ppl_base: Estimate
    log_ratio: Estimate
    ratio: Estimate
    difference: Estimate
    correlation: float
    kld: Estimate
    kld_at: dict[str, float]
    delta_p: Estimate
    delta_p_at: dict[str, float]
    delta_p_rms: Estimate
    same_top: Estimate
    n_tokens: int
    n_ctx: int
    n_chunks: int
    base: str
    kld_values: Values
    delta_p_values: Values

    def json(self) -> dict[str, Any]:
        return _json(self)


def _json(result: Any) -> dict[str, Any]:
    """As JSON has it: estimates are {value, error}, single tokens are left out."""
    out: dict[str, Any] = {}
    for field in fields(result):
        value = getattr(result, field.name)
        if not isinstance(value, np.ndarray):
            out[field.name] = value._asdict() if isinstance(value, Estimate) else value
    return out


KLD_AT = ("100", "99.9", "99", "95", "90", "50", "10", "5", "1", "0.1", "0")
DELTA_AT = ("100", "99.9", "99", "95", "90", "75", "50", "25", "10", "5", "1", "0.1", "0")


def mean(values: Values) -> Estimate:
    """As llama.cpp: no error (0) for ten values or fewer."""
    n = len(values)
    if not n:
        return Estimate(math.nan, math.nan)
    m = float(values.mean())
    variance = float((values * values).mean()) - m * m
    return Estimate(m, math.sqrt(variance / (n - 1)) if variance > 0 and n > 10 else 0.0)


def exponential(e: Estimate) -> Estimate:
    value = math.exp(e.value) if e.value < 700 else math.inf
    return Estimate(value, value * e.error)


def perplexity_of(nll: Values) -> Estimate:
    return exponential(mean(nll))


def percentiles(values: Values, at: Sequence[str]) -> dict[str, float]:
    return dict(zip(at, np.percentile(values, [float(p) for p in at]).tolist()))


def divergence_of(nll: Values, nll_base: Values, kld: Values, same_top: npt.NDArray[np.bool_], **about: Any) -> Divergence:
    """From one value for each token; `about` are the fields that say what was measured."""
    n = len(nll)
    log, base = mean(nll), mean(nll_base)
    covariance = (float((nll * nll_base).mean()) - log.value * base.value) / (n - 1) if n >= 10 else 0.0
    log_ratio = Estimate(log.value - base.value, _root(log.error ** 2 + base.error ** 2 - 2 * covariance))
    ppl, ppl_base = exponential(log), exponential(base)
    difference = Estimate(ppl.value - ppl_base.value,
                          _root(ppl.error ** 2 + ppl_base.error ** 2 - 2 * ppl.value * ppl_base.value * covariance))
    delta = np.exp(-nll) - np.exp(-nll_base)
    square = mean(delta * delta)
    rms = math.sqrt(square.value)
    same = float(same_top.mean())
    return Divergence(
        ppl=ppl, ppl_base=ppl_base, log_ratio=log_ratio, ratio=exponential(log_ratio), difference=difference,
        correlation=covariance / (log.error * base.error) if log.error and base.error else math.nan,
        kld=mean(kld), kld_at=percentiles(kld, KLD_AT), delta_p=mean(delta), delta_p_at=percentiles(delta, DELTA_AT),
        delta_p_rms=Estimate(rms, 0.5 / rms * square.error if rms else 0.0),
        same_top=Estimate(same, math.sqrt(same * (1 - same) / (n - 1)) if n > 1 else math.nan),
        n_tokens=n, kld_values=kld, delta_p_values=delta, **about)


def _root(square: float) -> float:
    return math.sqrt(max(square, 0.0))
