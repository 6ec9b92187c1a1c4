"""Where weights and caches live: which layers go to a device, by number, by pattern, or as many as fit its memory.

In: the options of a Model, names and sizes of its tensors, what a Context needs beside them. Out: a home for each weight and each
layer. It places nothing itself, and knows no graph.
"""
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import env
from .backend import Backend, Device, OutOfMemory, Progress, open_backend
from .errors import BackendError, PlacementError
from .tensor import Tensor

LAYER = re.compile(r"blk\.(\d+)\.")
MARGIN = 256 << 20                                   # bytes of a device that stay free for what the driver needs


@dataclass(frozen=True)
class Need:
    """Bytes that a Context needs on a device beside the weights: for each layer (K, V and state), and once (its arena)."""
    layers: Sequence[int] = ()
    once: int = 0


@dataclass
class Placement:
    """`first` is the first layer on the device, n_layer for the output alone, n_layer + 1 where there is none."""
    host: Backend
    device: Device | None = None
    first: int = 0
    homes: dict[Tensor, Backend] = field(default_factory=dict)

    @property
    def backends(self) -> list[Backend]:
        return [self.host] if self.device is None else [self.device, self.host]

    def layer(self, il: int) -> Backend:
        """Where the cache of layer il lives."""
        return self.host if self.device is None or il < self.first else self.device


def load(weights: Mapping[str, Tensor], n_layer: int, need: Need, progress: Progress | None = None, *,
         n_gpu_layers: int | str = "auto", override_tensor: Mapping[str, str] | None = None, repack: str = "auto",
         backend: str | None = None) -> Placement:
    """Open the backends and give each its weights. `PlacementError` where a number of layers that was asked for does not fit.
    `backend`: which one, instead of what GGRAPH_BACKEND says."""
    wanted, chosen = parse_layers(n_gpu_layers, n_layer), backend or env.get("GGRAPH_BACKEND")
    device = _open_device(wanted, chosen)
    host = open_backend("cpu" if chosen in ("", "cuda") else chosen, repack=repack)
    placement = place(weights, n_layer, _count(weights, n_layer, need, wanted, device), override_tensor, host, device)
    try:
        while not _give(placement, weights, progress):
            n = n_layer + 1 - placement.first
            if wanted is not None or n == 0:
                raise PlacementError(f"the memory of {device.name if device else ''} does not hold {n} layers; "
                                     "give a smaller n_gpu_layers, or 'auto'")
            placement = place(weights, n_layer, n - max(1, n // 8), override_tensor, host, device)
            env.log(f"out of memory on the device while loading: {n_layer + 1 - placement.first} of {n_layer + 1} layers instead")
    except BaseException:
        for opened in placement.backends:
            opened.close()
        raise
    _report(placement, n_layer)
    return placement


def _open_device(wanted: int | None, chosen: str) -> Device | None:
    """The device, if one is asked for: by GGRAPH_BACKEND=cuda, where its lack is an error, or by a number of layers, where it is
    one line. As long as no GPU has run the goldens, "auto" alone does not take one."""
    if chosen not in ("", "cuda") or wanted == 0 or (wanted is None and not chosen):
        return None
    try:
        device: Any = open_backend("cuda")
    except BackendError as e:
        if chosen:
            raise
        env.log(f"{e}; running on the CPU")
        return None
    return device  # type: ignore[no-any-return]


def _count(weights: Mapping[str, Tensor], n_layer: int, need: Need, wanted: int | None, device: Device | None) -> int:
    if device is None or wanted is not None:
        return wanted or 0
    return fitting(weights, n_layer, need, device.memory()[0])


def _give(placement: Placement, weights: Mapping[str, Tensor], progress: Progress | None) -> bool:
    """Let each backend take its weights; False if the device has not enough memory, which is then empty again."""
    on_device = [t for t in weights.values() if placement.device is not None and placement.homes.get(t) is placement.device]
    if placement.device is not None:
        try:
            placement.device.pack(on_device, progress)
        except OutOfMemory:
            placement.device.release()
            return False
    there = set(on_device)
    placement.host.pack([t for t in weights.values() if t not in there], progress)
    return True


def _report(placement: Placement, n_layer: int) -> None:
    if placement.device is not None:
        free, total = placement.device.memory()
        env.log(f"{n_layer + 1 - placement.first} of {n_layer + 1} layers on {placement.device.name} "
                f"({(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB in use)")


def parse_layers(n_gpu_layers: int | str, n_layer: int) -> int | None:
    """How many layers, the output counted as one more; None: as many as fit. `PlacementError` for what is no such number."""
    word = str(n_gpu_layers)
    if word in ("auto", "-1"):
        return None
    if word == "all":
        return n_layer + 1
    if not word.isdigit():
        raise PlacementError(f"n_gpu_layers is {n_gpu_layers!r}; it must be a number, 'auto' or 'all'")
    return min(int(word), n_layer + 1)


def layer_of(name: str, n_layer: int, tied: bool) -> int | None:
    """The layer that a weight belongs to: the output is layer n_layer, the embedding -1; None: it has no home, any may read it."""
    if found := LAYER.match(name):
        return int(found.group(1))
    if name.startswith(("output", "cls")) or (tied and name == "token_embd.weight"):
        return n_layer
    return -1 if name.startswith(("token_embd.", "per_layer_token_embd.")) else None


def fitting(weights: Mapping[str, Tensor], n_layer: int, need: Need, free: int) -> int:
    """How many layers fit `free` bytes, the output first, then from the last layer down; the embedding comes with all of them."""
    room, sizes = free - need.once - MARGIN, [0] * (n_layer + 2)
    for name, tensor in weights.items():
        il = layer_of(name, n_layer, "output.weight" not in weights)
        sizes[-1 if il is None else il] += int(tensor.nbytes)
    for il, n in enumerate(need.layers):
        sizes[il] += n
    room -= sizes[-1]
    for count, il in enumerate(range(n_layer, -1, -1)):
        room -= sizes[il]
        if room < 0:
            return count
    return n_layer + 1


def place(weights: Mapping[str, Tensor], n_layer: int, n_offloaded: int, override: Mapping[str, str] | None, host: Backend,
          device: Device | None) -> Placement:
    """The home of each weight. `override`: pattern -> "CPU" or the device's name ("CUDA0"); the first that matches wins."""
    placement = Placement(host, device, n_layer + 1 - n_offloaded)
    if device is None:
        return placement
    tied = "output.weight" not in weights
    rules = [(re.compile(pattern), _named(name, host, device)) for pattern, name in (override or {}).items()]
    for name, tensor in weights.items():
        il = layer_of(name, n_layer, tied)
        by_rule = next((home for pattern, home in rules if pattern.search(name)), None)
        if by_rule is not None:
            placement.homes[tensor] = by_rule
        elif il is not None:
            on_device = n_offloaded > n_layer if il < 0 else il >= placement.first
            placement.homes[tensor] = device if on_device else host
    return placement


def _named(name: str, host: Backend, device: Backend) -> Backend:
    word = name.lower()
    if word in ("cpu", host.name):
        return host
    if word.rstrip("0") in ("gpu", device.name):
        return device
    raise PlacementError(f"override_tensor names {name!r}; it must be 'CPU' or {device.name.upper() + '0'!r}")
