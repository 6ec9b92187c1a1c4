"""Recurrences: states read and written in place equal single nodes to the bit, sequences depend on themselves alone."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggraph import ops
from ggraph.backend import HostBuffer
from ggraph.backends import ref
from ggraph.errors import BackendError
from ggraph.tensor import F32, Tensor, leaf
from tests.backends.cpu.plans import Array, Native, tensor
from tests.backends.opcase import nmse, nodes_of

Kept = list[Tensor]
RNG = np.random.default_rng(14)
CPU, CPU2, REF = Native(1), Native(2), ref.open()
N_ROWS = 14
WITH_SNAPSHOTS = ("conv", "conv biased", "conv plain", "delta", "delta per channel", "delta grouped", "mamba", "mamba2",
                  "mamba2 narrow")
KINDS = (*WITH_SNAPSHOTS, "wkv6", "wkv7", "linear", "linear heads")


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


class Net:
    """One recurrence with its weights: `run` takes texts of some sequences from rows to rows, and gives their outputs."""

    def __init__(self, kind: str):
        self.kind = kind
        self.weights = {name: normal(*shape) for name, shape in
                        {"kernel": (48, 4), "bias": (48,), "A": (48, 32), "a": (4, 1), "first": (3, 32), "slopes": (3, 1)}.items()}
        self.n_state = {"conv": 3 * 48, "delta": 4 * 32 * 32, "mamba": 48 * 32, "mamba2": 4 * 16 * 32}.get(
            kind.split()[0], 3 * 32 * 32)
        if kind == "mamba2 narrow":
            self.n_state = 4 * 12 * 32
        self.n_in = {"conv": 48, "delta": 4 * 32 * 3 + 4 * 2 * 32, "mamba": 48 * 2 + 2 * 32, "mamba2": 4 * 16 + 4 + 2 * 2 * 32}.get(
            kind.split()[0], 6 * 96)

    def text(self, n: int, seed: int) -> Array:
        return np.random.default_rng(seed).standard_normal((n, self.n_in)).astype(np.float32)

    def run(self, backend: Any, cache: Array, src: Sequence[int], dst: Sequence[Any], texts: Sequence[Array], fused: bool = True
            ) -> Array:
        """f32 [n_seqs, n_tokens, outputs]; `cache` [N_ROWS, n_state] is changed. `dst` may have a row of each snapshot."""
        x = tensor(np.stack(texts))                                       # [n_in, n_tokens, n_seqs]
        store = leaf(F32, (self.n_state, N_ROWS), "cache")
        store.buffer = HostBuffer(cache.reshape(-1).view(np.uint8))
        rows, to = tensor(np.array(src, np.int32)), tensor(np.array(dst, np.int32).reshape(-1, len(src)))
        out, kept = getattr(self, "_" + self.kind.split()[0])(x, store, rows, to, len(texts[0]), len(texts))
        nodes = list(dict.fromkeys(n for t in (*kept, out) for n in nodes_of(t)))
        for n in nodes:
            if n.view_src is None and n.buffer is None:
                n.buffer = HostBuffer(np.full(max(int(n.nbytes), 1), 0xFF, np.uint8))
        keep = {out.root} if fused else {n.root for n in nodes if n.root.buffer is not store.buffer}
        backend.compile(nodes, keep).run()
        return np.array(out.root.buffer.data.view(np.float32)[:out.numel]).reshape(len(texts), len(texts[0]), -1)

    def _conv(self, x: Tensor, store: Tensor, rows: Tensor, to: Tensor, n: int, n_seqs: int) -> tuple[Tensor, Kept]:
        state = ops.reshape(ops.get_rows(store, rows), (3, 48, n_seqs))
        back = int(to.ne[1]) - 1
        padded = ops.concat(ops.pad(state, (), (back,)) if back else state, ops.transpose(x), 0)
        kept = []
        for i in range(back + 1):
            last = ops.cont(ops.view(padded, (3, 48, n_seqs), padded.nb[1:3], 4 * (n + back - i)), (144, n_seqs))
            kept.append(ops.set_rows(store, last, self._row(to, i)))
        y = ops.ssm_conv(ops.view(padded, (3 + n, 48, n_seqs), padded.nb[1:3], 4 * back), tensor(self.weights["kernel"]))
        y = ops.add(y, tensor(self.weights["bias"])) if "biased" in self.kind else y
        return y if "plain" in self.kind else ops.silu(y), kept

    def _delta(self, x: Tensor, store: Tensor, rows: Tensor, to: Tensor, n: int, n_seqs: int) -> tuple[Tensor, Kept]:
        n_k = 2 if "grouped" in self.kind else 4

        def part(start: int, d: int, heads: int) -> Tensor:
            return ops.view(x, (d, heads, n, n_seqs), (4 * d, x.nb[1], x.nb[2]), 4 * start)
        q, k = (ops.scale(ops.rms_norm(part(i, 32, n_k), 1e-6), 32 ** -0.5) for i in (0, 128))
        per_channel = "channel" in self.kind
        g = ops.neg(ops.softplus(ops.cont(part(384, 32 if per_channel else 1, 4))))
        beta = ops.sigmoid(ops.cont(part(500, 1, 4)))
        state = ops.reshape(ops.get_rows(store, rows), (32, 32, 4, n_seqs))
        both = ops.gated_delta_net(q, k, part(256, 32, 4), g, beta, state, int(to.ne[1]))
        return self._split(both, 128, n, n_seqs, store, to)

    def _mamba(self, x: Tensor, store: Tensor, rows: Tensor, to: Tensor, n: int, n_seqs: int) -> tuple[Tensor, Kept]:
        def part(start: int, d: int, heads: int) -> Tensor:
            return ops.view(x, (d, heads, n, n_seqs), (4 * d, x.nb[1], x.nb[2]), 4 * start)
        dt = ops.cont(ops.view(x, (48, n, n_seqs), x.nb[1:3], 4 * 48))
        a = ops.neg(ops.softplus(tensor(self.weights["A"])))
        states = ops.reshape(store, (32, 1, 48, N_ROWS))
        both = ops.ssm_scan(states, part(0, 1, 48), dt, a, part(96, 32, 1), part(128, 32, 1), rows, int(to.ne[1]))
        return self._split(both, 48, n, n_seqs, store, to)

    def _mamba2(self, x: Tensor, store: Tensor, rows: Tensor, to: Tensor, n: int, n_seqs: int) -> tuple[Tensor, Kept]:
        dim = 12 if "narrow" in self.kind else 16

        def part(start: int, d: int, heads: int) -> Tensor:
            return ops.view(x, (d, heads, n, n_seqs), (4 * d, x.nb[1], x.nb[2]), 4 * start)
        dt = ops.cont(ops.view(x, (4, n, n_seqs), x.nb[1:3], 4 * 64))
        a = ops.neg(ops.softplus(tensor(self.weights["a"])))
        states = ops.reshape(store, (32, dim, 4, N_ROWS))
        both = ops.ssm_scan(states, part(0, dim, 4), dt, a, part(68, 32, 2), part(132, 32, 2), rows, int(to.ne[1]))
        return self._split(both, 4 * dim, n, n_seqs, store, to)

    @staticmethod
    def _row(to: Tensor, snapshot: int) -> Tensor:
        return ops.view(to, to.ne[:1], (), snapshot * to.nb[1])

    def _parts(self, x: Tensor, n: int, n_seqs: int) -> list[Tensor]:
        """Six sources [32, 3, tokens of all sequences]."""
        return [ops.cont(ops.view(x, (32, 3, n * n_seqs), (128, x.nb[1]), 4 * 96 * i)) for i in range(6)]

    def _wkv6(self, x: Tensor, store: Tensor, rows: Tensor, to: Tensor, n: int, n_seqs: int) -> tuple[Tensor, Kept]:
        k, v, r, td, *_ = self._parts(x, n, n_seqs)
        both = ops.rwkv_wkv6(k, v, r, tensor(self.weights["first"]), ops.sigmoid(td), ops.get_rows(store, rows))
        return self._split(both, 96, n, n_seqs, store, to)

    def _wkv7(self, x: Tensor, store: Tensor, rows: Tensor, to: Tensor, n: int, n_seqs: int) -> tuple[Tensor, Kept]:
        r, w, k, v, a, b = self._parts(x, n, n_seqs)
        a, b = ops.scale(a, 0.1), ops.scale(b, 0.1)
        both = ops.rwkv_wkv7(r, ops.sigmoid(w), k, v, a, b, ops.get_rows(store, rows))
        return self._split(both, 96, n, n_seqs, store, to)

    def _linear(self, x: Tensor, store: Tensor, rows: Tensor, to: Tensor, n: int, n_seqs: int) -> tuple[Tensor, Kept]:
        k, v, q, g, *_ = self._parts(x, n, n_seqs)
        g = ops.sigmoid(tensor(self.weights["slopes"]) if "heads" in self.kind else g)
        both = ops.gated_linear_attn(k, v, q, g, ops.get_rows(store, rows), 0.5)
        return self._split(both, 96, n, n_seqs, store, to)

    def _split(self, both: Tensor, n_out: int, n: int, n_seqs: int, store: Tensor, to: Tensor) -> tuple[Tensor, Kept]:
        kept = []
        for i in range(int(to.ne[1])):
            start = 4 * (n_out * n * n_seqs + i * self.n_state * n_seqs)
            after = ops.view(both, (self.n_state, n_seqs), (4 * self.n_state,), start)
            kept.append(ops.set_rows(store, after, self._row(to, i)))
        return ops.scale(ops.view(both, (n_out, n * n_seqs), (4 * n_out,)), 1.0), kept


IN_PLACE = [(kind, ((1, 5, 2),)) for kind in KINDS] + [(kind, ((1, 5, 2), (3, 8, 7), (13, 11, 12))) for kind in WITH_SNAPSHOTS]


@pytest.mark.parametrize("n", [1, 2, 3, 17])
@pytest.mark.parametrize(("kind", "dst"), IN_PLACE)
def test_in_place_is_what_single_nodes_give(kind: str, dst: tuple[tuple[int, ...], ...], n: int) -> None:
    net, cache = Net(kind), normal(N_ROWS, Net(kind).n_state)
    texts = [net.text(n, s) for s in range(3)]
    results = []
    for backend, fused in ((CPU, True), (CPU2, True), (CPU, False), (REF, False)):
        mine = cache.copy()
        results.append((net.run(backend, mine, (4, 0, 6), dst, texts, fused), mine))
        if isinstance(backend, Native):
            assert not backend.fallback and any(m.op == "set_rows" for s in backend.plans[-1].steps for m in s.nodes)
    unset = [i for rows in dst[n:] for i in rows]                           # of states from before the first token
    for _, c in results:
        c[unset] = 0
    out, left = results[0]
    assert all(np.array_equal(out, y) and np.array_equal(left, c) for y, c in results[1:3])
    assert nmse(out, results[3][0]) < 1e-12 and nmse(left, results[3][1]) < 1e-12
    others = sorted(set(range(N_ROWS)) - {i for rows in dst for i in rows})
    assert np.array_equal(left[others], cache[others])                     # what is not named is not touched


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_moved_by_the_recurrence_itself(kind: str) -> None:
    net = Net(kind)
    net.run(CPU, normal(N_ROWS, net.n_state), (0,), (1, 2) if kind in WITH_SNAPSHOTS else (1,), [net.text(2, 0)])
    steps = [[m.op for m in s.nodes] for s in CPU.plans[-1].steps]
    assert not [s for s in steps if s in (["get_rows"], ["set_rows"], ["concat"], ["pad"])]


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 20), st.data())
def test_a_sequence_is_the_same_alone_and_among_others_in_one_piece_or_many(kind: str, n: int, data: st.DataObject) -> None:
    net, texts = Net(kind), [Net(kind).text(n, s) for s in range(3)]
    cut = data.draw(st.integers(0, n))
    cache = normal(N_ROWS, net.n_state)
    cache[3:] = 0
    alone = [net.run(CPU, cache.copy(), (3,), (0,), [x]) for x in texts]
    parts = []
    for piece, src, dst in ((slice(0, cut), (3, 4, 5), (0, 1, 2)), (slice(cut, n), (0, 1, 2), (3, 4, 5))):
        if piece.stop > piece.start:
            parts.append(net.run(CPU2, cache, src if cut else (3, 4, 5), dst, [x[piece] for x in texts]))
    assert np.array_equal(np.concatenate(parts, axis=1), np.concatenate(alone))


def test_a_row_number_outside_of_the_cache_is_an_error() -> None:
    for kind in KINDS:
        net = Net(kind)
        for src, dst in ((N_ROWS, 0), (-1, 0), (0, N_ROWS), (0, -1)):
            with pytest.raises(BackendError, match="error 1 "):
                net.run(CPU, normal(N_ROWS, net.n_state), (src,), (dst,), [net.text(1, 0)])
        if kind in WITH_SNAPSHOTS:
            with pytest.raises(BackendError, match="error 1 "):
                net.run(CPU, normal(N_ROWS, net.n_state), (0,), (1, N_ROWS), [net.text(2, 0)])


def test_a_state_that_something_else_reads_is_written() -> None:
    """The new state as an output of its own: then the recurrence keeps its place in the result, too."""
    net = Net("delta")
    x = tensor(normal(2, 5, net.n_in))
    store, rows, to = tensor(normal(N_ROWS, net.n_state)), tensor(np.array([0, 1], np.int32)), tensor(np.array([2, 3], np.int32))
    _, kept = net._delta(x, store, rows, to, 5, 2)
    seen = ops.scale(kept[0].src[1], 2.0)
    nodes = list(dict.fromkeys([*nodes_of(kept[0]), *nodes_of(seen)]))
    for n in nodes:
        if n.view_src is None and n.buffer is None:
            n.buffer = HostBuffer(np.full(int(n.nbytes), 0xFF, np.uint8))
    CPU.compile(nodes, {seen}).run()
    doubled = seen.buffer.data.view(np.float32).reshape(2, -1)
    assert np.array_equal(doubled, 2 * store.buffer.data.view(np.float32).reshape(N_ROWS, -1)[2:4])


