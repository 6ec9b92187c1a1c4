"""The backend contract: what the scheduler asks of a device, and how one is found.

A backend owns buffers and turns a split (a run of nodes of one graph) into something that runs. It sees tensors and
ops, never models, memory or contexts. The core never imports a backend by name: `open_backend` finds the folder.
"""
from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from . import env
from .errors import BackendError
from .tensor import Tensor


class OutOfMemory(BackendError):
    """A device, or the host, has no room for what was asked."""


SMALL = 64 << 20                                # bytes that are not asked for first


class HostBuffer:
    """Bytes in host memory: a uint8 array (owned, or a mapped file) and its address."""
    __slots__ = ("address", "data", "nbytes")

    def __init__(self, data: np.ndarray):
        self.data, self.nbytes = data, data.nbytes
        self.address: int = data.ctypes.data

    @classmethod
    def zeros(cls, nbytes: int, align: int = 64) -> HostBuffer:
        """Aligned; pages become resident when they are first written. `OutOfMemory` for more than there is."""
        if nbytes > SMALL and nbytes > (free := env.free_memory()):
            raise OutOfMemory(f"{nbytes / 2**20:.0f} MiB of memory are needed, {free / 2**20:.0f} MiB are free; "
                              "give a smaller n_ctx, n_ubatch or n_seq_max")
        raw = np.zeros(nbytes + align, np.uint8)
        start = -raw.ctypes.data % align
        return cls(raw[start:start + nbytes])


Progress = Callable[[str, int, int], None]          # (what, done, total)


class NodeTime(NamedTuple):
    """What one step took: `nodes` are one node, or those that were fused; `seconds` from the end of the step before."""
    nodes: tuple[Tensor, ...]
    seconds: float


class Ceilings(NamedTuple):
    """What a device gives at most, measured: bytes read per second, and multiply-adds of int8 per second."""
    bandwidth: float
    products: float


class Finding(NamedTuple):
    """What is known of one part of the installation. `state`: "ok"; "missing" (nothing here uses it); "broken" (it is used, and
    does not work). `remedy` is what mends it, a command where there is one."""
    part: str
    name: str
    value: str
    state: str = "ok"
    remedy: str = ""


class Repeat(NamedTuple):
    """Sections of a split that are alike but for the weights and caches that they use. Of the nodes to compile the first two are a
    part; the others are to run right behind the second. `leaves`: of each section, its weights and caches, in one order."""
    sections: Sequence[Sequence[Tensor]]
    leaves: Sequence[Sequence[Tensor]]


class Uneven(Exception):
    """What was compiled of two sections differs by more than where weights and caches are, so that it says nothing of others."""


class Compiled(Protocol):
    """One split, ready to run with the sizes that it was last given."""
    reads: Collection[Tensor]                   # roots that it reads: an input that is not among them needs no filling

    def resize(self, values: Mapping[str, int]) -> None:
        """Take over the sizes of the next batch: variable name -> value."""

    def run(self, n_threads: int = 1, times: list[NodeTime] | None = None) -> None:
        """With `times`, the clock is read around each step and its time appended."""

    def abort(self) -> None:
        """Stop this run, and no other, soon: it then raises `Aborted`. From any thread; nothing happens where it does not run."""


class Backend(Protocol):
    name: str
    host: bool                                  # buffers are host memory that NumPy can see
    repeats: bool                               # `compile` takes a `Repeat`

    def alloc(self, nbytes: int) -> Any:
        """Zeroed: what was never written must not turn a masked sum into NaN, and is a new sequence's state."""
    def free(self, buffer: Any) -> None: ...
    def upload(self, buffer: Any, offset: int, data: np.ndarray) -> None: ...
    def download(self, buffer: Any, offset: int, nbytes: int) -> np.ndarray:
        """uint8 [nbytes]; on a host backend a view of the bytes themselves."""
    def fetch(self, buffer: Any, offset: int, nbytes: int) -> Callable[[], np.ndarray]:
        """As `download`, of the bytes as they are when all that runs now has ended; what is returned waits for that."""
    def supports(self, node: Tensor) -> bool: ...
    def pack(self, weights: Sequence[Tensor], progress: Progress | None = None) -> None:
        """Take a model's weights: what a mat-mul here reads is repacked or uploaded, now or on first use; once per model."""
    def compile(self, nodes: Sequence[Tensor], keep: Collection[Tensor] = (), repeat: Repeat | None = None) -> Compiled:
        """`keep`: roots whose bytes something after this split reads; the rest may be fused away. Error: `Uneven`, if
        there is no `repeat` in it."""
    def ceilings(self, n_threads: int) -> Ceilings | None:
        """Measure them (a second or so); None where the backend has no fast paths to judge."""
    def sync(self) -> None: ...
    def close(self) -> None: ...


class Device(Backend, Protocol):
    """A backend with memory of its own."""

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes."""
    def release(self) -> None:
        """Free all weights that `pack` took."""
    def weight_bytes(self, weights: Iterable[Tensor]) -> int:
        """Bytes that `pack` would allocate for these."""
    def needs(self, splits: Sequence[tuple[Sequence[Tensor], Collection[Tensor]]]) -> int:
        """Bytes that are allocated when these (nodes, keep) are compiled in this order, and nothing was before."""


def backend_names() -> list[str]:
    """The backends that there are, whether they can be opened here or not."""
    folder = importlib.import_module(f"{__package__}.backends")
    return sorted(m.name for m in pkgutil.iter_modules(folder.__path__) if m.ispkg)


def open_backend(name: str, **options: Any) -> Backend:
    """The backend in folder `backends/<name>`; BackendError names what is missing."""
    if name not in backend_names():
        raise BackendError(f"there is no backend {name!r}; there are: {', '.join(backend_names())}")
    try:
        module = importlib.import_module(f"{__package__}.backends.{name}")
    except ModuleNotFoundError as e:
        raise BackendError(f"backend {name!r} cannot be opened: {e}") from e
    backend: Backend = module.open(**options)
    return backend
