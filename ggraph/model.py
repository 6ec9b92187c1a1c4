"""A loaded model: the mapped file, its hyperparameters, checked weights and vocabulary. Immutable; shared by Contexts.

In: a path or a known name. Out: `Model`. Opening maps and checks the file and computes nothing; weights are placed and
repacked when the first Context opens (`place`). An architecture is found by module name, then by entry point.
"""
from __future__ import annotations

import importlib
import pkgutil
import re
import threading
from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from weakref import WeakSet

from . import gguf, placement
from .backend import Backend, Progress, backend_names
from .errors import Error, ModelError, Single, expect, named
from .hparams import HParams
from .weights import Audit, Weights

if TYPE_CHECKING:
    from .chat import ChatTemplate
    from .vocab import Vocab

REPACK = ("auto", "on", "off")


class Architecture(Protocol):
    """What an architecture's module provides."""

    def hparams(self, kv: Mapping[str, Any]) -> HParams: ...
    def weights(self, t: Weights) -> None: ...
    def graph(self, b: Any) -> None: ...


@runtime_checkable
class Predictor(Architecture, Protocol):
    """What it provides besides if its files may have a block for next-token prediction (MTP)."""

    def nextn_weights(self, t: Weights) -> None: ...
    def nextn_graph(self, b: Any) -> None: ...


class Model(Single):
    """A GGUF file, ready for `Context(model)`.

    `path` is a file (any shard of a split set) or a name that `ggraph.hub` knows. `kv_overrides` replaces metadata,
    `n_gpu_layers` (a number, "all" or "auto"), `device` ("CUDA0", "none"), `override_tensor` (pattern -> "CPU" or "CUDA0") and
    `repack` ("auto", "on", "off") say how weights are placed, `backend` ("ref", "cpu", ..) on which backend alone instead of
    what GGRAPH_BACKEND says. Errors: `GGUFError` for a damaged file, `ModelError` for an unknown architecture or tensors that
    do not fit it.
    """

    instead = "threads may share it, a process opens its own with Model(path)"

    def __init__(self, path: str | Path, *, n_gpu_layers: int | str = "auto", override_tensor: Mapping[str, str] | None = None,
                 kv_overrides: Mapping[str, Any] | None = None, repack: str = "auto", backend: str | None = None,
                 device: str | None = None):
        self._overrides = named("kv_overrides", kv_overrides)
        check_override(override_tensor)
        placement.parse_device(device)
        if repack not in REPACK:
            raise Error(f"repack is {repack!r}; it must be one of {', '.join(REPACK)}")
        if backend is not None and backend not in backend_names():
            raise Error(f"backend is {backend!r}; it must be one of {', '.join(backend_names())}")
        self.path = resolve(path)
        self.file = gguf.File(self.path)
        try:
            self.kv: Mapping[str, Any] = ChainMap(self._overrides, self.file.kv)  # type: ignore[arg-type]
            self.arch = find_architecture(str(self.kv.get("general.architecture", self.file.arch)))
            with sensible(self.path.name):
                self.hparams: HParams = self.arch.hparams(self.kv)
                self.weights = Weights(self.file, self.hparams)
                self.arch.weights(self.weights)
            self.weights.check_leftovers()
            placement.parse_layers(n_gpu_layers, self.hparams.n_layer)
        except BaseException:
            self.file.close()
            raise
        self.wish = placement.Wish(n_gpu_layers, override_tensor, repack, backend, device)
        self.placement: placement.Placement | None = None
        self.contexts: WeakSet[Any] = WeakSet()         # those that stand on this model
        self.closed = False
        self._lock = threading.Lock()
        self._nextn: HParams | None = None
        self._vocab: Vocab | None = None
        self._template: ChatTemplate | None = None

    @property
    def n_vocab(self) -> int:
        return self.hparams.n_vocab

    @property
    def n_params(self) -> int:
        return sum(t.n_elements for t in self.file.tensors.values())

    @property
    def vocab(self) -> Vocab:
        if self._vocab is None:
            from .vocab import Vocab
            self._vocab = Vocab(self.file, kv_overrides=self._overrides)
        return self._vocab

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The file's own chat template; None if it has none."""
        source = self.kv.get("tokenizer.chat_template")
        if self._template is None and source:
            from .chat import ChatTemplate
            bos, eos = ("" if i is None else self.vocab.text(i) for i in (self.vocab.bos, self.vocab.eos))
            self._template = ChatTemplate(source, bos_token=bos, eos_token=eos)
        return self._template

    @property
    def backends(self) -> list[Backend]:
        """Those that run this model, the host last; none before the first Context."""
        return self.placement.backends if self.placement else []

    def place(self, progress: Progress | None = None, need: placement.Need = lambda placement: 0) -> placement.Placement:
        """Open the backends and give them the weights, once; a later call returns the same placement.

        `need` tells what the Context at hand takes on the device of a placement, beside the weights. `PlacementError` where that
        does not fit.
        """
        with self._lock:
            self.check_open()
            if self.placement is None:
                self.placement = placement.load(self.weights.leaves, self.hparams.n_layer, self.wish, need, progress)
            return self.placement

    def enter(self, ctx: Any) -> None:
        """A Context that stands on this model from now on, and is about to take memory."""
        with self._lock:
            self.check_open()
            self.contexts.add(ctx)

    def leave(self, ctx: Any) -> None:
        """A Context that could not be opened."""
        with self._lock:
            self.contexts.discard(ctx)

    def check_open(self) -> None:
        """ModelError if this model was closed."""
        if self.closed:
            raise ModelError(f"the model {self.path.name} is closed; load it again with Model(path)")

    def retreat(self, why: str, progress: Progress | None = None) -> None:
        """Place fewer layers on the device, which has no room for a Context beside them. `PlacementError` where their number
        was asked for, or another Context stands on them."""
        with self._lock:
            assert self.placement is not None
            self.placement.fixed = self.placement.fixed or len(self.contexts) > 1
            placement.fewer(self.placement, self.weights.leaves, self.hparams.n_layer, self.wish, why, progress)

    @property
    def has_nextn(self) -> bool:
        """The file holds a block for next-token prediction (MTP)."""
        return f"blk.{self.hparams.n_layer}.nextn.eh_proj.weight" in self.file.tensors

    def nextn(self) -> HParams:
        """Declare the weights of that block, once, and place them with the others; the hyperparameters of its graph.

        `ModelError` if the file has none, or its architecture here runs none.
        """
        arch = self.arch
        if not self.has_nextn or not isinstance(arch, Predictor):
            what = f"architecture {self.hparams.arch!r} runs no" if self.has_nextn else f"{self.path.name} holds no"
            raise ModelError(f"{what} block for next-token prediction (MTP); draft with a smaller model, or \"ngram\"")
        with self._lock:
            if self._nextn is None:
                before = set(self.weights.leaves)
                del self.weights.blk[self.hparams.n_layer:]             # of an attempt that failed
                with sensible(self.path.name):
                    arch.nextn_weights(self.weights)
                for b in self.backends:
                    b.pack([t for name, t in self.weights.leaves.items() if name not in before])
                self._nextn = self.hparams.nextn()
        return self._nextn

    def encoder(self) -> HParams:
        """The hyperparameters of the encoder that it has beside its decoder. `ModelError` if it has none."""
        if self.hparams.encoder is None:
            raise ModelError(f"{self.path.name} has no encoder beside a decoder")
        return self.hparams.encoder

    def close(self) -> None:
        """Close the Contexts of this model, free what the backends hold and unmap the file. Error where a hook asks for it."""
        with self._lock:
            self.closed = True
            contexts = list(self.contexts)
        try:
            for ctx in contexts:
                ctx.close()
        except Error:
            self.closed = False
            raise
        for b in self.backends:
            b.close()
        self.placement = None
        self.weights.leaves.clear()
        self.file.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def check_override(override: Mapping[str, str] | None) -> None:
    """Error unless each key is a regular expression, and each value the name of a device."""
    for pattern, where in named("override_tensor", override).items():
        expect(f"override_tensor[{pattern!r}]", where, str, "the name of a device")
        try:
            re.compile(pattern)
        except re.error as e:
            raise Error(f"override_tensor has the pattern {pattern!r}, which is no regular expression: {e}") from None


def audit(file: gguf.File) -> list[gguf.Fault]:
    """Tensors that are missing, have a wrong shape, or that the file's architecture does not know; `ModelError` if the
    architecture is unknown or its metadata makes no sense."""
    expect("file", file, gguf.File, "a gguf.File")
    arch = find_architecture(file.arch)
    with sensible(file.path.name):
        table = Audit(file, arch.hparams(file.kv))
        arch.weights(table)
    unknown = {name: f"architecture {file.arch!r} does not know tensor {name!r}" for name in table.leftovers()
               if name not in table.faults}
    return [gguf.Fault(name, message) for name, message in (table.faults | unknown).items()]


@contextmanager
def sensible(name: str) -> Iterator[None]:
    """What an architecture cannot compute with is metadata that makes no sense: a ModelError."""
    try:
        yield
    except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as e:
        what = str(e) or type(e).__name__
        raise ModelError(f"the metadata of {name} makes no sense to its architecture: {what}") from e


def resolve(path: str | Path) -> Path:
    """The file behind a path or a known name."""
    from . import hub
    return hub.resolve(path)


def known_architectures() -> list[str]:
    """Names of all architectures that can be run: those of this package, their aliases, and plugins."""
    package = importlib.import_module(f"{__package__}.models")
    own = [m.name for m in pkgutil.iter_modules(package.__path__)]
    return sorted({*own, *package.ALIASES, *(e.name for e in entry_points(group="ggraph.models"))})


def find_architecture(name: str) -> Architecture:
    """The module of `general.architecture`, else the plugin of this name; else ModelError says what is missing for it, or lists the
    known ones."""
    package = importlib.import_module(f"{__package__}.models")
    module = package.ALIASES.get(name, name).replace("-", "_")
    if module in {m.name for m in pkgutil.iter_modules(package.__path__)}:
        own: Architecture = importlib.import_module(f"{package.__name__}.{module}")
        return own
    for plugin in entry_points(group="ggraph.models"):
        if plugin.name.replace("-", "_") == module:
            try:
                found: Architecture = plugin.load()
            except Exception as e:
                raise ModelError(f"the plugin {plugin.value} of architecture {name!r} cannot be loaded: {e}") from e
            return found
    if name in package.UNSUPPORTED:
        raise ModelError(f"architecture {name!r} is not supported: it needs {package.UNSUPPORTED[name]}, which is not built")
    raise ModelError(f"architecture {name!r} is not known; known ones: {', '.join(known_architectures())}")
