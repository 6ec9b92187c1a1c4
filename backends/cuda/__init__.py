"""The CUDA backend: a split becomes a list of kernel launches, which is captured once and replayed with one call.

In: nodes whose buffers are on the device, weights that are mapped on the host. Out: `Compiled`. What it asks of a GPU goes through
`device`; kernels are in `kernels/`. Nodes without a kernel are refused (`supports`), and the scheduler gives them to the host.
"""
from __future__ import annotations

import importlib
import pkgutil
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np

from ggraph import env
from ggraph.backend import Ceilings, OutOfMemory, Progress, Repeat
from ggraph.ops import VIEWS
from ggraph.tensor import Tensor

from .device import Device, Kernel
from .lower import Emit, can
from .lower import lower as lowered
from .plan import Compiled

__all__ = ["Buffer", "Compiled", "Cuda", "Device", "Kernel", "OutOfMemory", "open", "open_device"]


ALIGN = 256                                         # bytes, of a weight


@dataclass(eq=False)
class Buffer:
    """Memory on the device."""
    address: int
    nbytes: int


class Cuda:
    """One device. Weights are uploaded by `pack`, or when a node first reads them; `graphs`: whether launches are captured."""
    name = "cuda"
    host = False
    repeats = False

    def __init__(self, device: Device):
        self.device = device
        self.graphs = env.get("GGRAPH_CUDA_GRAPH") != "0"
        self.weights: dict[Tensor, Buffer] = {}     # parts of
        self.packs: list[Buffer] = []
        self.shared: dict[str, list[Buffer]] = {}   # memory that plans use while they run, by purpose; the last is the largest
        self.turn = threading.Lock()                # of plans: their launches stand together on the stream
        self.packing = threading.RLock()            # several threads may open Contexts of one model
        self.reported: set[str] = set()
        for module in pkgutil.iter_modules(__path__):
            if module.name.startswith(("ops_", "fuse_")):
                importlib.import_module(f"{__name__}.{module.name}")

    def alloc(self, nbytes: int) -> Buffer:
        return Buffer(self.device.alloc(max(int(nbytes), 1)), int(nbytes))

    def free(self, buffer: Buffer) -> None:
        self.device.free(buffer.address)

    def upload(self, buffer: Buffer, offset: int, data: np.ndarray) -> None:
        self.device.upload(buffer.address + int(offset), data)

    def download(self, buffer: Buffer, offset: int, nbytes: int) -> np.ndarray:
        return self.device.download(buffer.address + int(offset), int(nbytes))

    def fetch(self, buffer: Buffer, offset: int, nbytes: int) -> Callable[[], np.ndarray]:
        return self.device.fetch(buffer.address + int(offset), int(nbytes))

    def memory(self) -> tuple[int, int]:
        return self.device.memory()

    def supports(self, node: Tensor) -> bool:
        """False, and said once for each op and type, where there is no kernel."""
        if node.op in VIEWS or can(node, self.device.max_shared):
            return True
        what = f"{node.op} of {', '.join(s.type.name for s in node.src if s is not None)}"
        if what not in self.reported:
            self.reported.add(what)
            env.log(f"cuda has no kernel for {what}: it runs on the CPU")
        return False

    def pack(self, weights: Sequence[Tensor], progress: Progress | None = None) -> None:
        """All that are new in one piece: a device rounds each of its pieces up, to megabytes. They count as there once all are."""
        with self.packing:
            new = [t for t in weights if t not in self.weights and not isinstance(t.buffer, Buffer)]
            if not new:
                return
            piece, offset, placed = self.alloc(self.weight_bytes(new)), 0, {}
            self.packs.append(piece)
            for i, weight in enumerate(new):
                placed[weight] = Buffer(piece.address + offset, int(weight.nbytes))
                self.upload(piece, offset, weight.buffer.data[weight.offset:weight.offset + int(weight.nbytes)])
                offset += self.weight_bytes([weight])
                if progress:
                    progress("weights", i + 1, len(new))
            self.weights |= placed

    def weight_bytes(self, weights: Iterable[Tensor]) -> int:
        return sum(-(-int(t.nbytes) // ALIGN) * ALIGN for t in weights)

    def resident(self, weight: Tensor) -> Buffer:
        """A weight's memory on the device; uploaded when it is first asked for."""
        if weight not in self.weights:
            self.pack([weight])
        return self.weights[weight]

    def share(self, purpose: str, nbytes: int) -> int:
        """The address of so much memory, zeroed at first, that plans use while they run: one runs at a time, so all share it. It
        stays where it is, since recorded launches know it."""
        with self.packing:
            areas = self.shared.setdefault(purpose, [Buffer(0, 0)])
            if nbytes > areas[-1].nbytes:
                areas.append(self.alloc(nbytes))
            return areas[-1].address

    def needs(self, splits: Sequence[tuple[Sequence[Tensor], Collection[Tensor]]]) -> int:
        emitted = [self.lower(nodes, keep) for nodes, keep in splits]
        return sum(_grown(n) for n in zip(*((e.scratch_bytes, e.ticket_bytes) for e in emitted)))

    def lower(self, nodes: Sequence[Tensor], keep: Collection[Tensor]) -> Emit:
        return lowered([n for n in nodes if n.op not in VIEWS], frozenset(keep), self.device.library, self.device.max_shared)

    def place(self, tensor: Tensor) -> tuple[int, int]:
        """(address of the buffer, byte offset in it) on the device."""
        root = tensor.root
        if isinstance(root.buffer, Buffer):
            return root.buffer.address, root.offset + tensor.view_offs
        return self.resident(root).address, tensor.view_offs

    def compile(self, nodes: Sequence[Tensor], keep: Collection[Tensor] = (), repeat: Repeat | None = None) -> Compiled:
        return Compiled(self, self.lower(nodes, keep))

    def ceilings(self, n_threads: int) -> Ceilings | None:
        """Not measured yet."""
        return None

    def release(self) -> None:
        for piece in self.packs:
            self.free(piece)
        self.packs.clear()
        self.weights.clear()

    def sync(self) -> None:
        self.device.sync()

    def close(self) -> None:
        """Free all that is left on the device."""
        self.packs.clear()
        self.weights.clear()
        self.device.close()


def _grown(sizes: Sequence[int]) -> int:
    """Bytes of all areas, where each size that exceeds those before it takes a new one."""
    return sum(largest for largest, _ in groupby(accumulate(sizes, max)))


def open_device(number: int = 0) -> Device:
    """What GGRAPH_CUDA_DEVICE names: a GPU unless it says `emulator`. `BackendError` says what is missing."""
    if env.get("GGRAPH_CUDA_DEVICE") == "emulator":
        from .emulator import Emulator
        device: Device = Emulator()
    else:
        from . import diagnosis
        from .cupy_device import CupyDevice
        diagnosis.check(number)
        device = CupyDevice(number)
    return device


def open(device: int = 0) -> Cuda:
    """`device`: its number. `BackendError` with one sentence, and what mends it, where that cannot be used."""
    return Cuda(open_device(device))
