"""The text of the kernels: what a compiler is given, and a hash that changes with anything that it includes.

In: a file's name and macros. Out: source, include files, names of kernels. The tables of the grid types are written here, from
`ggraph.quants`, so that they stand in one place.
"""
from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path

import numpy as np

from ggraph.quants.grids import grid

FOLDER = Path(__file__).with_name("kernels")
KERNEL = re.compile(r"^KERNEL (?:__launch_bounds__\((\d+)\) )?(\w+)\(", re.MULTILINE)
USUAL = 256                         # threads of a block that a kernel must allow which says nothing: each may have all registers
INCLUDE = re.compile(r'^#include "(\w+\.cuh)"', re.MULTILINE)
GRIDS = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S")
Defines = tuple[tuple[str, str], ...]


def files() -> list[str]:
    """Names of all kernel files, without their ending."""
    return sorted(p.stem for p in FOLDER.glob("*.cu"))


@cache
def header(name: str) -> str:
    return grids() if name == "grids.cuh" else (FOLDER / name).read_text()


@cache
def source(file: str) -> str:
    """The text of `kernels/<file>.cu`."""
    return (FOLDER / f"{file}.cu").read_text()


@cache
def kernels(file: str) -> dict[str, int]:
    """The kernels that a file defines, each with the most threads that its blocks may have."""
    return {name: int(bound or USUAL) for bound, name in KERNEL.findall(source(file))}


def headers(text: str) -> dict[str, str]:
    """All that a source includes, directly or not: name -> text."""
    found: dict[str, str] = {}
    waiting = INCLUDE.findall(text)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = header(name)
            waiting += INCLUDE.findall(found[name])
    return found


@cache
def grids() -> str:
    """Each point of a grid as one word, its first value lowest. Points of IQ1 as 8 * value + 8 (see IQ1_S in quants.cuh)."""
    lines = []
    for name in GRIDS:
        points = grid(name) * np.int8(8) + np.int8(8) if name == "IQ1_S" else grid(name)
        words = np.ascontiguousarray(points).view(np.uint64 if points.shape[1] == 8 else np.uint32)[:, 0]
        kind, suffix = ("uint64_t", "ull") if points.shape[1] == 8 else ("uint32_t", "u")
        lines.append(f"DEVICE_TABLE {kind} GRID_{name}[{len(words)}] = {{{', '.join(f'{w:#x}{suffix}' for w in words.tolist())}}};")
    return "\n".join(lines) + "\n"


def key(file: str, defines: Defines, *more: str) -> str:
    """A name for what the compiler makes of this: the same text, macros and `more` (target, version) give the same name."""
    text = source(file)
    parts = [text, *(t for _, t in sorted(headers(text).items())), repr(defines), *more]
    return f"{file}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]}"
