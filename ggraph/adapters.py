"""Adapters: LoRAs and control vectors, small files that change what a model computes without touching its weights.

In: a GGUF file. Out: `Adapter`, which a Context takes with a scale, and `Mix`, the set that is on. A LoRA adds the product of
two thin matrices to a weight, a control vector adds a direction to the hidden states behind a layer; both are nodes of the
graph, nothing is merged. It knows no graphs.
"""
from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from . import env
from .errors import Error, ModelError, Single, expect, integer, numbers, wrong
from .gguf import File, TensorInfo
from .tensor import Tensor
from .weights import Weights, trim, weight_of

TOKEN_EMBD = "token_embd.weight"        # of its pair A has a row per token, so that rows of it can be taken


class Pair(NamedTuple):
    """What a LoRA adds to a weight: scale * B A, of rank r. A [n_in, r], B [r, n_out]; of token_embd A [r, n_vocab],
    B [r, n_embd]."""
    a: Tensor
    b: Tensor
    scale: float                        # alpha / r


class Adapter(Single):
    """A LoRA or control vector from a GGUF file, for `Context(adapters=[(adapter, scale)])` and `Context.set_adapters`.

    `pairs`: weight -> what is added to it. `directions`: layer -> F32 [n_embd], added behind it. `layer_range`: the first and
    last layer that a control vector is for (default: all that it has). Errors: `GGUFError` for a damaged file, `ModelError` for
    a file that is no adapter.
    """

    def __init__(self, path: str | Path, *, layer_range: tuple[int, int] | None = None):
        layers = None if layer_range is None else _layers(layer_range)
        self.file = File(path)
        self.path = self.file.path
        self.pairs: dict[str, Pair] = {}
        self.directions: dict[int, Tensor] = {}
        try:
            if any(name.startswith("direction.") for name in self.file.tensors):
                self.arch = ""                                  # fits every model of its width
                self._read_directions(layers)
            else:
                self._read_lora(layers)
        except BaseException:
            self.file.close()
            raise

    def _read_directions(self, layer_range: tuple[int, int] | None) -> None:
        first, last = layer_range or (1, len(self.file.tensors) + 10**6)
        for name, info in self.file.tensors.items():
            number = re.fullmatch(r"direction\.([1-9]\d*)", name)
            if not number or len(trim(info.ne)) != 1:
                raise self._wrong(f"the tensor {name!r} {list(info.ne)}, which is no direction of a layer")
            if first <= int(number[1]) <= last:
                self.directions[int(number[1])] = weight_of(info)
        if not self.directions:
            raise self._wrong(f"no direction for layers {first} to {last}")

    def _read_lora(self, layer_range: tuple[int, int] | None) -> None:
        kv, tensors = self.file.kv, self.file.tensors
        if kv.get("general.type") != "adapter" or kv.get("adapter.type") != "lora":
            raise ModelError(f"{self.path.name} is neither a LoRA (general.type adapter, adapter.type lora) nor a control vector")
        if layer_range is not None:
            raise ModelError(f"{self.path.name} is a LoRA; a layer range is for control vectors")
        if "adapter.alora.invocation_tokens" in kv:
            raise self._wrong("an activated LoRA, which begins at certain tokens; that is not supported")
        self.arch = str(kv.get("general.architecture"))
        alpha, ignored = float(kv.get("adapter.lora.alpha", 0.0)), []
        for name in tensors:
            base, _, part = name.rpartition(".")
            if part not in ("lora_a", "lora_b"):
                if not name.endswith("_norm.weight"):
                    raise self._wrong(f"the tensor {name!r}, which is neither a .lora_a nor a .lora_b")
                ignored.append(name)
            elif f"{base}.lora_a" not in tensors or f"{base}.lora_b" not in tensors:
                raise self._wrong(f"only one of the two tensors for {base!r}")
            elif part == "lora_a":
                self.pairs[base] = self._pair(base, tensors[name], tensors[f"{base}.lora_b"], alpha)
        if ignored:
            env.log(f"{self.path.name}: {len(ignored)} norms are ignored, as llama.cpp does, first {ignored[0]}")

    def _pair(self, base: str, a: TensorInfo, b: TensorInfo, alpha: float) -> Pair:
        rank = b.ne[0]
        if (a.ne[0] if base == TOKEN_EMBD else (*a.ne, 1)[1]) != rank:
            raise self._wrong(f"for {base!r} matrices {list(a.ne)} and {list(b.ne)} of different ranks")
        return Pair(weight_of(a), weight_of(b), alpha / rank if alpha else 1.0)

    def _wrong(self, what: str) -> ModelError:
        return ModelError(f"{self.path.name} holds {what}")

    @property
    def kind(self) -> str:
        """"lora" or "control_vector"."""
        return "lora" if self.pairs else "control_vector"

    @property
    def leaves(self) -> list[Tensor]:
        return [t for pair in self.pairs.values() for t in pair[:2]] + list(self.directions.values())

    def check(self, weights: Weights) -> None:
        """ModelError if this adapter was not made for a model with these weights."""
        hp, name = weights.hp, self.path.name
        if self.arch and self.arch != hp.arch:
            raise ModelError(f"{name} was made for architecture {self.arch!r}, the model has {hp.arch!r}")
        for base, pair in self.pairs.items():
            if base not in weights.leaves:
                raise ModelError(f"{name} changes {base!r}, which the model does not have: was it made for another one?")
            ne, made = weights.leaves[base].ne, _changes(base, pair)
            if made != tuple(ne):
                raise ModelError(f"{name} changes {base!r} as {list(trim(made))}; in the model it has {list(trim(ne))}")
        for il, direction in self.directions.items():
            if il >= hp.n_layer or direction.ne[0] != hp.n_embd:
                raise ModelError(f"{name} has a direction of {direction.ne[0]} values for layer {il}; the model has {hp.n_embd} "
                                 f"values and layers 1 to {hp.n_layer - 1} that take one")

    def close(self) -> None:
        """Unmap the file. Contexts that use this adapter must not be used afterwards."""
        self.file.close()

    def __enter__(self) -> Adapter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Mix:
    """The adapters of a Context and how much of each. Which ones is part of the graph; their scales are an input of it."""

    def __init__(self, scales: dict[Adapter, float] | None = None):
        self.scales = scales or {}

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        return tuple(self.scales)

    @staticmethod
    def checked(asked: Sequence[tuple[Adapter, float]], weights: Weights) -> dict[Adapter, float]:
        """The scales of what was asked for; those of 0 are off. Errors as `Adapter.check`."""
        scales: dict[Adapter, float] = {}
        expect("adapters", asked, Sequence, "a list of pairs of an Adapter and its scale")
        for pair in asked:
            if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], Adapter):
                raise wrong("an entry of adapters", pair, "an Adapter and its scale")
            adapter, scale = pair
            numbers(**{f"the scale of the adapter {adapter.path.name}": scale})
            if adapter in scales:
                raise Error(f"the adapter {adapter.path.name} is given twice")
            adapter.check(weights)
            scales[adapter] = float(scale)
        return {adapter: scale for adapter, scale in scales.items() if scale}


def _layers(given: Sequence[int]) -> tuple[int, int]:
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise wrong("layer_range", given, "the first and the last layer")
    first, last = (integer("a layer of layer_range", il) for il in given)
    if not 0 < first <= last:
        raise ModelError(f"layer_range is {first} to {last}; a control vector's layers are a range from 1 up")
    return first, last


def _changes(base: str, pair: Pair) -> tuple[int, ...]:
    """The shape of the weight that this pair is for."""
    a, b = pair.a.ne, pair.b.ne
    if base == TOKEN_EMBD:
        return (b[1], a[1], 1, 1)
    return (a[0], b[1], *(n if n == m else 0 for n, m in zip(a[2:], b[2:])))
