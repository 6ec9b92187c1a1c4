"""Ops that work element by element: arithmetic, activations and gated activations."""
from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from .arrays import Array, Operand, row_numbers, tile
from .table import elementwise, f32, kernel

BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}

for _name, _function in BINARY.items():
    elementwise(_name, lambda a, b, _function=_function: _function(a, tile(b, a.shape)))


@kernel
def add_id(out: Operand, a: Array, b: Array, ids: Array) -> Array:
    return a + b[0, 0, row_numbers(ids[0, 0], b.shape[2], out.tensor)]


@kernel
def scale(out: Operand, x: Array) -> Array:
    return x * f32(out.params["s"]) + f32(out.params["bias"])


@kernel
def clamp(out: Operand, x: Array) -> Array:
    return np.clip(x, f32(out.params["lo"]), f32(out.params["hi"]))


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def gelu(x: Array) -> Array:
    return f32(0.5) * x * (1 + np.tanh(f32(math.sqrt(2 / math.pi)) * x * (1 + f32(0.044715) * x * x)))


def erf(x: Array) -> Array:
    """In float64, one call per element: NumPy has none."""
    return np.asarray(np.frompyfunc(math.erf, 1, 1)(x), np.float32)


def gelu_erf(x: Array) -> Array:
    return f32(0.5) * x * (1 + erf(x * f32(math.sqrt(0.5))))


def gelu_quick(x: Array) -> Array:
    return x / (1 + np.exp(f32(-1.702) * x))


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def softplus(x: Array) -> Array:
    return np.where(x > 20, x, np.log1p(np.exp(x)))


def hardsigmoid(x: Array) -> Array:
    return np.clip((x + 3) / 6, 0, 1)


UNARY: dict[str, Callable[[Array], Array]] = {
    "abs": np.abs, "neg": np.negative, "exp": np.exp, "expm1": np.expm1, "log": np.log, "sqr": np.square,
    "sqrt": np.sqrt, "sin": np.sin, "cos": np.cos, "relu": relu, "gelu": gelu, "gelu_erf": gelu_erf,
    "gelu_quick": gelu_quick, "silu": silu, "sigmoid": sigmoid, "tanh": np.tanh, "softplus": softplus,
    "elu": lambda x: np.where(x > 0, x, np.expm1(x)), "step": lambda x: np.heaviside(x, 0),
    "sgn": np.sign, "hardsigmoid": hardsigmoid, "hardswish": lambda x: x * hardsigmoid(x)}

for _name, _unary in UNARY.items():
    elementwise(_name, _unary)

GATES: dict[str, Callable[[Array], Array]] = {
    "swiglu": silu, "geglu": gelu, "reglu": relu, "geglu_erf": gelu_erf, "geglu_quick": gelu_quick}

for _name, _gate in GATES.items():
    elementwise(_name, lambda gate, up, _gate=_gate: _gate(gate) * up)


@kernel
def swiglu_oai(out: Operand, gate: Array, up: Array) -> Array:
    alpha, limit = f32(out.params["alpha"]), f32(out.params["limit"])
    g, u = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return g / (1 + np.exp(-alpha * g)) * (u + 1)


@kernel
def swiglu_clamp(out: Operand, gate: Array, up: Array) -> Array:
    limit = f32(out.params["limit"])
    return silu(np.minimum(gate, limit)) * np.clip(up, -limit, limit)
