"""Where weights and caches live: which layers go to a device, by number, by pattern, or as many as fit its memory.

In: the options of a Model, names and sizes of its tensors, what a Context needs beside them. Out: a home for each weight and each
layer. It places nothing itself, and knows no graph.
"""
from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import env
from .backend import Backend, Device, OutOfMemory, Progress, open_backend
from .errors import BackendError, PlacementError, expect
from .tensor import Tensor

LAYER = re.compile(r"(?:enc\.)?blk\.(\d+)\.")
DEVICE = "cuda"                                      # the backend with memory of its own
MARGIN = 256 << 20                                   # bytes of a device that stay free for what the driver needs


@dataclass(frozen=True)
class Wish:
    """What a Model was asked for. `n_gpu_layers`: a number, "all" or "auto". `override_tensor`: pattern -> "CPU" or "CUDA0".
    `device`: "CUDA0", or "none". `backend`: which one, instead of what GGRAPH_BACKEND says."""
    n_gpu_layers: int | str = "auto"
    override_tensor: Mapping[str, str] | None = None
    repack: str = "auto"
    backend: str | None = None
    device: str | None = None


@dataclass
class Placement:
    """`first` is the first layer on the device, n_layer for the output alone, n_layer + 1 where there is none. `number` is that
    of the device, `fixed` says that the number of layers was asked for."""
    host: Backend
    device: Device | None = None
    first: int = 0
    number: int = 0
    fixed: bool = True
    homes: dict[Tensor, Backend] = field(default_factory=dict)

    @property
    def backends(self) -> list[Backend]:
        return [self.host] if self.device is None else [self.device, self.host]

    def layer(self, il: int) -> Backend:
        """Where the cache of layer il lives."""
        return self.host if self.device is None or il < self.first else self.device

    def whole(self, layers: Iterable[int]) -> bool:
        """All weights, and the caches of these layers, live on the device."""
        return self.device is not None and {*self.homes.values(), *map(self.layer, layers)} == {self.device}


Need = Callable[[Placement], int]                    # bytes that a Context takes on the device beside the weights placed there


def load(weights: Mapping[str, Tensor], n_layer: int, wish: Wish, need: Need, progress: Progress | None = None) -> Placement:
    """Open the backends and give each its weights; `need` is asked where as many layers are wanted as fit. `PlacementError` where a
    number of layers that was asked for does not fit; nothing stays open then."""
    number = parse_device(wish.device)
    wanted, chosen = parse_layers(wish.n_gpu_layers, n_layer), wish.backend or env.get("GGRAPH_BACKEND")
    if number is not None and chosen not in ("", DEVICE):
        raise PlacementError(f"backend {chosen!r} and device {wish.device!r} exclude one another; give one of them")
    opened: list[Any] = []
    try:
        if number is not None or wish.device is None:
            by_rule = any(name.lower() != "cpu" for name in (wish.override_tensor or {}).values())
            opened.append(_open_device(wanted, by_rule, chosen, number))
        device = opened[0] if opened else None
        opened.append(open_backend("cpu" if chosen in ("", DEVICE) else chosen, repack=wish.repack))
        placement = Placement(opened[-1], device, number=number or 0, fixed=wanted is not None)
        if device is not None:
            n = fitting(placement, weights, n_layer, wish, need) if wanted is None else wanted
            place(placement, weights, n_layer, n, wish.override_tensor)
        _give(placement, weights, n_layer, wish, progress)
    except BaseException:
        for backend in filter(None, opened):
            backend.close()
        raise
    return placement


def fewer(placement: Placement, weights: Mapping[str, Tensor], n_layer: int, wish: Wish, why: str,
          progress: Progress | None = None) -> None:
    """Place fewer layers on the device, which has no room for what comes beside them. `PlacementError` where that is not allowed,
    or none is left."""
    _shrink(placement, weights, n_layer, wish, why)
    _give(placement, weights, n_layer, wish, progress)


def _open_device(wanted: int | None, by_rule: bool, chosen: str, number: int | None) -> Device | None:
    """The device, if one is asked for: by its name or GGRAPH_BACKEND=cuda, where its lack is an error, or by a number of layers,
    where it is one line. As long as no GPU has run the goldens, "auto" alone does not take one."""
    named = number is not None or bool(chosen)
    if chosen not in ("", DEVICE) or (wanted == 0 and not by_rule) or (wanted is None and not named):
        return None
    try:
        device: Any = open_backend(DEVICE, device=number or 0)
    except BackendError as e:
        if named:
            raise
        env.log(f"{e}; running on the CPU")
        return None
    return device  # type: ignore[no-any-return]


def _give(placement: Placement, weights: Mapping[str, Tensor], n_layer: int, wish: Wish, progress: Progress | None) -> None:
    """Let each backend take its weights, the device fewer layers until they fit."""
    while (device := placement.device) is not None:
        try:
            device.pack([t for t, home in placement.homes.items() if home is device], progress)
            break
        except OutOfMemory as e:
            why = str(e)
        _shrink(placement, weights, n_layer, wish, why)
    on_device = {t for t, home in placement.homes.items() if home is placement.device}
    placement.host.pack([t for t in weights.values() if t not in on_device], progress)
    if placement.device is not None and not on_device:
        env.log(f"no layer fits the memory of {placement.device.name}; running on the CPU")
        placement.device.close()
        placement.device = None
    _report(placement, n_layer)


def _shrink(placement: Placement, weights: Mapping[str, Tensor], n_layer: int, wish: Wish, why: str) -> None:
    """Homes for fewer layers; the device has given up all weights then."""
    assert placement.device is not None
    n, name = n_layer + 1 - placement.first, placement.device.name
    if placement.fixed or n == 0:
        raise PlacementError(f"the memory of {name} does not hold {n} of {n_layer + 1} layers with what they need ({why}); give "
                             "fewer (n_gpu_layers), or 'auto', a smaller n_ctx, or keep the cache on the host (offload_kqv=False)")
    placement.device.release()
    place(placement, weights, n_layer, n - max(1, n // 8), wish.override_tensor)
    env.log(f"out of memory on {name} while loading: {n_layer + 1 - placement.first} of {n_layer + 1} layers instead")


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


def parse_device(device: str | None) -> int | None:
    """The number of the device that is named; None: none is. `PlacementError` for what is no such name."""
    if device is not None:
        expect("device", device, str, f"a name like {DEVICE.upper()}0")
    found = re.fullmatch(rf"(?:{DEVICE}|gpu)(\d+)|none|cpu", device or "none", re.IGNORECASE)
    if found is None:
        raise PlacementError(f"device is {device!r}; it must be '{DEVICE.upper()}0' (or another number), or 'none'")
    return int(found[1]) if found[1] else None


def layer_of(name: str, n_layer: int, tied: bool) -> int | None:
    """The layer that a weight belongs to: the output is layer n_layer, the embedding -1; None: it has no home, any may read it."""
    if found := LAYER.match(name):
        return int(found.group(1))
    if name.startswith(("output", "cls")) or (tied and name == "token_embd.weight"):
        return n_layer
    return -1 if name.startswith(("token_embd.", "per_layer_token_embd.")) else None


def fitting(placement: Placement, weights: Mapping[str, Tensor], n_layer: int, wish: Wish, need: Need) -> int:
    """How many layers fit the free memory of the device, the output first, then from the last layer down; the embedding comes with
    all of them."""
    assert placement.device is not None
    device, room = placement.device, placement.device.memory()[0] - MARGIN

    def too_many(n: int) -> bool:
        place(placement, weights, n_layer, n, wish.override_tensor)
        taken = device.weight_bytes(t for t, home in placement.homes.items() if home is device)
        return taken > room or taken + need(placement) > room
    all_of_them = n_layer + 1
    return bisect_left(range(1, all_of_them + 1), True, key=too_many) if too_many(all_of_them) else all_of_them


def place(placement: Placement, weights: Mapping[str, Tensor], n_layer: int, n_offloaded: int,
          override: Mapping[str, str] | None) -> None:
    """Set the home of each weight. `override`: pattern -> "CPU" or the device's name ("CUDA0"); the first that matches wins."""
    host, device = placement.host, placement.device
    assert device is not None
    placement.first = n_layer + 1 - n_offloaded
    placement.homes.clear()
    tied = "output.weight" not in weights
    rules = [(re.compile(pattern), _named(name, placement)) for pattern, name in (override or {}).items()]
    for name, tensor in weights.items():
        il = layer_of(name, n_layer, tied)
        by_rule = next((home for pattern, home in rules if pattern.search(name)), None)
        if by_rule is not None:
            placement.homes[tensor] = by_rule
        elif il is not None:
            on_device = n_offloaded > n_layer if il < 0 else il >= placement.first
            placement.homes[tensor] = device if on_device else host


def _named(name: str, placement: Placement) -> Backend:
    word, device = name.lower(), placement.device
    assert device is not None
    if word in ("cpu", placement.host.name):
        return placement.host
    own = f"{device.name}{placement.number}"
    if word in ("gpu", device.name, own):
        return device
    raise PlacementError(f"override_tensor names {name!r}; it must be 'CPU' or {own.upper()!r}")
