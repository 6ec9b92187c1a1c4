"""What the op table stands on: building the leaves of a case, running it on any backend, comparing two results.

In: a backend and a case of `optable`. Out: the result as an array. It must not know any op or kernel.
"""
from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ggraph import dtypes, quants
from ggraph.backend import Backend, HostBuffer
from ggraph.backends.ref.arrays import Operand
from ggraph.dtypes import F32, I32, DType
from ggraph.size import Size, Sizes
from ggraph.tensor import Tensor, leaf

Array = Any
LARGEST = {"n_tokens": 7, "n_kv": 64}
SMALLER = ({"n_tokens": 1, "n_kv": 32}, {"n_tokens": 5, "n_kv": 64})
TOLERANCE = {"mul_mat": 5e-4, "mul_mat_id": 5e-4, "flash_attn_ext": 5e-4}      # NMSE; as llama.cpp's own tests allow


class Build:
    """Makes the leaves of one case, with their bytes, and hands out the sizes.

    Built at the sizes `built`, filled for the sizes `present`: what lies behind a leaf's present bytes is 0xFF.
    """

    def __init__(self, backend: Backend, seed: int = 0, present: Mapping[str, int] = LARGEST,
                 built: Mapping[str, int] = LARGEST):
        self.backend, self.rng = backend, np.random.default_rng(seed)
        self.present, self.built = present, built
        self.sizes_used: set[str] = set()
        self.weights: list[Tensor] = []

    def _size(self, name: str) -> Size:
        self.sizes_used.add(name)
        return Size.variable(name, self.built[name])

    @property
    def n_tokens(self) -> Size:
        return self._size("n_tokens")

    @property
    def n_kv(self) -> Size:
        return self._size("n_kv")

    def shape(self, ne: Sequence[int]) -> tuple[int, ...]:
        """`ne` at the present sizes, in NumPy order."""
        return tuple(Sizes(ne).set(self.present).tolist()[::-1])

    def leaf(self, type: DType, ne: Sequence[int], data: Array) -> Tensor:
        """A contiguous tensor; its bytes are those of `data`, which has the present sizes."""
        tensor = leaf(type, ne, "leaf")
        raw = np.full(int(tensor.nbytes), 0xFF, np.uint8)
        present = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        raw[:present.nbytes] = present
        tensor.buffer = self.backend.alloc(raw.nbytes)
        self.backend.upload(tensor.buffer, 0, raw)
        return tensor

    def any(self, type: DType, *ne: int) -> Tensor:
        """Random elements of any type, about normal."""
        return self.leaf(type, ne, random_blocks(type, int(np.prod(self.shape(ne))) // type.block, self.rng))

    def f32(self, *ne: int) -> Tensor:
        return self.any(F32, *ne)

    def positive(self, *ne: int) -> Tensor:
        """From 0.1 to 2."""
        return self.leaf(F32, ne, self.rng.uniform(0.1, 2, self.shape(ne)).astype(np.float32))

    def weight(self, type: DType, *ne: int) -> Tensor:
        """As `any`, and given to the backend's `pack`."""
        self.weights.append(self.any(type, *ne))
        return self.weights[-1]

    def ints(self, below: int, *ne: int) -> Tensor:
        return self.leaf(I32, ne, self.rng.integers(0, below, self.shape(ne)).astype(np.int32))

    def distinct(self, below: int, n: int) -> Tensor:
        """n different row numbers."""
        return self.leaf(I32, (n,), self.rng.permutation(below)[:self.shape((n,))[0]].astype(np.int32))

    def mask(self, type: DType, *ne: int) -> Tensor:
        """0 or -inf, the first column seen by all."""
        values = np.where(self.rng.random(self.shape(ne)) < 0.4, -np.inf, 0).astype(np.float32)
        values[..., 0] = 0
        return self.leaf(type, ne, quants.pack(values, type))


class Case(NamedTuple):
    """`make` gives the node of op `op`, on leaves and views that it takes from the builder."""
    op: str
    label: str
    make: Callable[[Build], Tensor]

    def __str__(self) -> str:
        return f"{self.op}-{self.label}" if self.label else self.op

    def build(self, backend: Backend, present: Mapping[str, int] = LARGEST,
              built: Mapping[str, int] = LARGEST) -> tuple[Build, Tensor]:
        g = Build(backend, zlib.crc32(str(self).encode()), present, built)
        return g, self.make(g)


def run_case(backend: Backend, case: Case, present: Mapping[str, int] = LARGEST,
             built: Mapping[str, int] = LARGEST) -> Array:
    """The result in NumPy order, float32 for all float types; for ops that write in place all of what they write to.

    Same case and same `present` sizes: same leaves, whatever the backend. Where `present` is smaller than `built`, the
    plan is resized.
    """
    g, result = case.build(backend, present, built)
    nodes = nodes_of(result)
    for node in nodes:
        if node.view_src is None:
            node.buffer = backend.alloc(int(node.nbytes))
    backend.pack(g.weights)
    plan = backend.compile(nodes, {result.root})
    if present != built:
        plan.resize(present)
    plan.run()
    backend.sync()
    return _read(backend, result.root, present)


def _read(backend: Backend, tensor: Tensor, present: Mapping[str, int]) -> Array:
    numbers = Sizes((*tensor.ne, *tensor.nb)).set(present).tolist()
    host = leaf(tensor.type, tensor.ne, tensor.name)
    host.buffer = HostBuffer(np.array(backend.download(tensor.buffer, 0, int(tensor.nbytes))))
    return Operand(host, numbers[:4], numbers[4:], 0, {}).read()


def sizes_of(backend: Backend, case: Case) -> Sequence[Mapping[str, int]]:
    """The sizes at which a case differs: only the largest where it uses none."""
    return (LARGEST, *SMALLER) if case.build(backend)[0].sizes_used else (LARGEST,)


def nmse(x: Array, expected: Array) -> float:
    """Mean square error over the mean square of what is expected; infinities and NaN must stand at the same places."""
    x, expected = np.asarray(x, np.float64), np.asarray(expected, np.float64)
    assert x.shape == expected.shape, (x.shape, expected.shape)
    finite = np.isfinite(expected)
    if not np.array_equal(x[~finite], expected[~finite], equal_nan=True):
        return float("inf")
    error, power = np.square(x[finite] - expected[finite]).sum(), np.square(expected[finite]).sum()
    return float(error / power) if power else float(error)


def check(backend: Backend, ref: Backend, case: Case, sizes: Sequence[Mapping[str, int]] = (LARGEST, *SMALLER)) -> None:
    """Assert that a backend gives what `ref` gives, at each of `sizes`."""
    for present in sizes:
        error = nmse(run_case(backend, case, present), run_case(ref, case, present))
        assert error <= TOLERANCE.get(case.op, 1e-7), f"{case} at {dict(present)}: NMSE {error:.2e}"


def nodes_of(tensor: Tensor) -> list[Tensor]:
    """Everything but leaves that `tensor` needs, in order, itself last."""
    found: dict[Tensor, None] = {}

    def visit(t: Tensor | None) -> None:
        if t is not None and t not in found and t.op != "none":
            for s in t.src:
                visit(s)
            found[t] = None
    visit(tensor)
    return list(found)


def random_blocks(type: DType, n: int, rng: np.random.Generator) -> Array:
    """uint8 [n, bytes of a block]: random bits under scales that make values of about 1."""
    if type in quants.PACKABLE:
        return quants.pack(rng.standard_normal((n, type.block)).astype(np.float32), type)
    raw = rng.integers(0, 256, (n, type.nbytes), np.uint8)
    blocks = raw.view(quants.QUANTS[type].layout)[:, 0]
    for name in blocks.dtype.names or ():
        if blocks.dtype[name] == np.float16:
            blocks[name] = rng.uniform(0.5, 1, n) / (4 if type.block < 256 else 64)
    if type is dtypes.MXFP4:
        blocks["e"] = rng.integers(125, 129, n)
    elif type is dtypes.NVFP4:
        blocks["d"] = rng.integers(40, 64, (n, 4))
    elif type is dtypes.IQ1_M:                          # the half-precision scale lies in the top nibbles
        d = (rng.uniform(0.5, 1, n) / 4).astype(np.float16).view(np.uint16)
        nibbles = d[:, None] >> np.arange(0, 16, 4, dtype=np.uint16) << np.uint16(12)
        blocks["scales"] = blocks["scales"] & np.uint16(0xFFF) | nibbles
    return raw
