"""Steps that run as one: fewer waits, the same bits; and what must not be joined is not."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ggraph import ops, quants
from ggraph.backend import HostBuffer
from ggraph.backends import cpu
from ggraph.backends.cpu.join import TOGETHER
from ggraph.dtypes import F16, F32, I32, Q4_0
from ggraph.schedule.order import together
from ggraph.size import Size
from ggraph.tensor import Tensor, leaf
from tests.backends.cpu.plans import Native, tensor

Array = Any
RNG = np.random.default_rng(5)
N, FFN, HEAD = 64, 160, 16


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def weight(n: int, k: int) -> Tensor:
    return tensor(quants.pack(normal(n, k), Q4_0), Q4_0)


class Layer:
    """Half a layer over n tokens: norm, Q and K turned, K and V stored; then gate, up and down, and a sum."""

    def __init__(self, n_tokens: int):
        n = Size.variable("n_tokens", 9)
        self.x, pos = leaf(F32, (N, n), "x"), leaf(I32, (n,), "pos")
        self.w = [weight(rows, k) for rows, k in ((N, N), (N // 2, N), (N // 2, N), (FFN, N), (FFN, N), (N, FFN))]
        self.k, self.v = (tensor(np.zeros((12, N // 2), np.float16).view(np.uint8), F16) for _ in range(2))
        self.leaves = (self.x, pos)
        y = ops.mul(ops.rms_norm(self.x, 1e-5), tensor(normal(N)))
        q, k, v = (ops.mul_mat(w, y) for w in self.w[:3])
        q = self._turn(q, pos, n)
        stores = [ops.set_rows(self.k, ops.reshape(self._turn(k, pos, n), (N // 2, n)), pos), ops.set_rows(self.v, v, pos)]
        z = ops.mul(ops.rms_norm(ops.reshape(q, (N, n)), 1e-5), tensor(normal(N)))
        gate, up = (ops.mul_mat(w, z) for w in self.w[3:5])
        self.out = ops.add(ops.mul_mat(self.w[5], ops.swiglu(gate, up)), self.x)
        self.nodes = together(self._order(stores, self.out))
        self.place(n_tokens, pos)
        self.backend = Native()
        self.backend.pack(self.w)

    @staticmethod
    def _turn(x: Tensor, pos: Tensor, n: int) -> Tensor:
        return ops.rope(ops.reshape(x, (HEAD, x.ne[0] // HEAD, n)), pos, None, n_dims=HEAD, mode=ops.NORMAL, freq_base=1e4)

    @staticmethod
    def _order(stores: list[Tensor], out: Tensor) -> list[Tensor]:
        from ggraph.graph import Graph
        g = Graph()
        for node in (*stores, out):
            g.expand(node)
        return list(g.computed())

    def place(self, n_tokens: int, pos: Tensor) -> None:
        for n in (*self.leaves, *self.nodes):
            if n.view_src is None:
                n.buffer = HostBuffer.zeros(int(n.nbytes))
        self.n_tokens = n_tokens
        pos.buffer.data[:4 * n_tokens] = RNG.permutation(12)[:n_tokens].astype(np.int32).view(np.uint8)
        self.x.buffer.data[:4 * N * n_tokens] = normal(n_tokens, N).reshape(-1).view(np.uint8)

    def run(self, n_threads: int) -> tuple[list[bytes], cpu.Compiled]:
        """All that outlives the plan, and the plan."""
        for t in (self.k, self.v):
            t.buffer.data[:] = 0
        compiled = self.backend.compile(self.nodes, {self.out})
        compiled.resize({"n_tokens": self.n_tokens})
        compiled.run(n_threads)
        return [t.buffer.data.tobytes() for t in (self.out, self.k, self.v)], compiled


def n_joined(compiled: cpu.Compiled) -> int:
    """Steps, those that belong together counted as one."""
    return sum(not s.flags & TOGETHER for s in compiled.steps)


@pytest.mark.parametrize("n_tokens", [1, 2, 9])
def test_a_layer_in_few_steps_has_the_bits_of_one_in_many(n_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(n_tokens)
    results = {n_threads: layer.run(n_threads) for n_threads in (1, 2, 5)}
    assert n_joined(results[1][1]) <= 7 and len(results[1][1].steps) >= 16
    monkeypatch.setattr(cpu, "join", lambda steps: None)
    alone, compiled = layer.run(2)
    assert n_joined(compiled) == len(compiled.steps)
    assert all(bits == alone for bits, _ in results.values())


def overlapping(shift: int) -> int:
    """Steps of two sums, the second of which writes over what the first reads, `shift` rows further on."""
    x = tensor(normal(16, 64))
    x.buffer = HostBuffer.zeros(10000)
    first, second = ops.add(x, x), ops.mul(tensor(normal(16, 64)), tensor(normal(16, 64)))
    first.buffer, second.buffer, second.offset = HostBuffer.zeros(4096), x.buffer, 256 * shift
    compiled = Native().compile([first, second], {first, second})
    return n_joined(compiled)


def test_a_step_over_bytes_that_are_still_read_waits() -> None:
    assert overlapping(0) == 1 and overlapping(1) == 2 and overlapping(16) == 1


def test_products_of_the_same_activations_stand_together_unless_these_change() -> None:
    x, w = tensor(normal(4, N)), [weight(N, N) for _ in range(3)]
    y = ops.scale(x, 2.0)
    a, b = ops.mul_mat(w[0], y), ops.mul_mat(w[1], y)
    turned = ops.scale(a, 3.0)
    assert together([y, a, turned, b]) == [y, a, b, turned]
    written = ops.cpy(turned, y)
    assert together([y, a, turned, written, b]) == [y, a, turned, written, b]
