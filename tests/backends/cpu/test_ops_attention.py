"""Native attention: the formula in float64, and the same bits however a batch, a cache or the threads are laid out."""
from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggraph import ops, quants
from ggraph.backends import ref
from ggraph.backends.cpu import ops_attention, targets
from ggraph.dtypes import BF16, F16, F32, IQ4_NL, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, DType
from ggraph.tensor import Tensor
from tests.backends.cpu.plans import Array, Native, evaluate, tensor
from tests.backends.opcase import nmse
from tests.backends.optable import CASES, Case, run_case, sizes_of

RNG = np.random.default_rng(17)
CPU, CPU2, REF = Native(1), Native(2), ref.open()
LENGTH = 300                            # tokens of a history: three chunks


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


@dataclass
class History:
    """Queries, keys and values of the tokens of one sequence, at positions first, first + 1, ..."""
    q: Array                            # [n, n_head, dk]
    k: Array                            # [n, n_head_kv, dk], as the cache's type holds it
    v: Array                            # [n, n_head_kv, dv]
    first: int = 0

    @classmethod
    def random(cls, n: int = LENGTH, heads: tuple[int, int] = (3, 1), d: tuple[int, int] = (64, 64),
               types: tuple[DType, DType] = (F16, F16)) -> History:
        k, v = (quants.unpack(quants.pack(normal(n, heads[1], size), t), t) for size, t in zip(d, types))
        return cls(normal(n, heads[0], d[0]), k, v)


@dataclass
class Setting:
    """How attention is asked for, and where cells lie. `size` cells per stream; cells that no one lists are NaN."""
    types: tuple[DType, DType] = (F16, F16)
    window: int = 0                     # 0: none
    params: dict[str, float] = field(default_factory=dict)
    sinks: Array | None = None
    streams: bool = False
    shuffled: bool = False
    size: int = 2 * LENGTH + 20
    n_kv: int = 0

    def cells(self, histories: Sequence[History]) -> list[Array]:
        """The row of each token's K and V in a cache [streams * size]."""
        if self.streams:
            return [s * self.size + self._some(self.size)[:len(h.k)] for s, h in enumerate(histories)]
        some, ends = self._some(self.size), np.cumsum([len(h.k) for h in histories])
        return [some[end - len(h.k):end] for h, end in zip(histories, ends)]

    def _some(self, n: int) -> Array:
        return (RNG.permutation(n) if self.shuffled else np.arange(3, n)).astype(np.int32)


def attend(histories: Sequence[History], tokens: Sequence[tuple[int, int]], how: Setting, backend: Native = CPU) -> Array:
    """[n_tokens, n_head, dv] for tokens (sequence, index in its history), in the order of a ubatch."""
    node = make_node(histories, tokens, how)
    result = evaluate(node, backend)
    assert not backend.fallback
    return result.reshape(len(tokens), *result.shape[2:])


def make_node(histories: Sequence[History], tokens: Sequence[tuple[int, int]], how: Setting) -> Tensor:
    cells = how.cells(histories)
    n_stream = len(histories) if how.streams else 1
    k, v = (_cache([getattr(h, name) for h in histories], cells, n_stream, how.size, t)
            for name, t in zip("kv", how.types))
    q = np.stack([histories[s].q[i] for s, i in tokens])
    q = q.reshape(n_stream, -1, *q.shape[1:])
    lists, spans = _lists(histories, cells, tokens, how)
    mask = _mask(histories, cells, tokens, how, n_stream) if how.params.get("max_bias") else None
    scale = how.params.get("scale", q.shape[-1] ** -0.5)
    return ops.flash_attn_ext(ops.permute(tensor(q), (0, 2, 1, 3)), k, v, mask,
                              None if how.sinks is None else tensor(how.sinks), lists, spans,
                              **{"scale": scale, **how.params})


def _cache(rows: Sequence[Array], cells: Sequence[Array], n_stream: int, size: int, type: DType) -> Tensor:
    _, n_head, d = rows[0].shape
    raw = np.full((n_stream * size, type.row_bytes(n_head * d)), 0xFF, np.uint8)
    for x, at in zip(rows, cells):
        raw[at] = quants.pack(x.reshape(len(x), -1), type)
    leaf = tensor(raw.reshape(n_stream, size, -1), type)
    view = ops.view(leaf, (d, n_head, size, n_stream), (type.row_bytes(d), *leaf.nb[1:3]))
    return ops.permute(view, (0, 2, 1, 3))


def _visible(h: History, i: int, how: Setting) -> tuple[int, int]:
    return max(0, i + 1 - how.window) if how.window else 0, i + 1


def _lists(histories: Sequence[History], cells: Sequence[Array], tokens: Sequence[tuple[int, int]], how: Setting
           ) -> tuple[Tensor, Tensor]:
    starts: dict[int, int] = {}
    lists: list[Array] = []
    for s, _ in tokens:
        if s not in starts:
            starts[s] = sum(map(len, lists))
            lists.append(cells[s])
    spans = [(starts[s], *_visible(histories[s], i, how), histories[s].first) for s, i in tokens]
    return tensor(np.concatenate(lists)), tensor(np.array(spans, np.int32).T)


def _mask(histories: Sequence[History], cells: Sequence[Array], tokens: Sequence[tuple[int, int]], how: Setting,
          n_stream: int) -> Tensor:
    """[n_stream, 1, n_tokens / n_stream, size]: minus the distance where a token sees a cell."""
    mask = np.full((len(tokens), how.size), -np.inf, np.float32)
    for row, (s, i) in zip(mask, tokens):
        lo, hi = _visible(histories[s], i, how)
        row[cells[s][lo:hi] % how.size] = np.arange(lo, hi) - i
    return tensor(mask.reshape(n_stream, 1, -1, how.size))


def formula(h: History, i: int, how: Setting) -> Array:
    """Token i of a history in float64: [n_head, dv]."""
    lo, hi = _visible(h, i, how)
    group = h.q.shape[1] // h.k.shape[1]
    k, v = (np.repeat(x[lo:hi].astype(np.float64), group, 1) for x in (h.k, h.v))
    x = np.einsum("hd,nhd->hn", h.q[i].astype(np.float64), k) * how.params.get("scale", h.q.shape[-1] ** -0.5)
    if cap := how.params.get("logit_softcap"):
        x = cap * np.tanh(x / cap)
    if max_bias := how.params.get("max_bias"):
        x += ref.rows.alibi_slopes(len(x), max_bias)[:, None] * (np.arange(lo, hi) - i)
    sinks = np.full(len(x), -np.inf) if how.sinks is None else how.sinks.astype(np.float64)
    top = np.maximum(x.max(1), sinks)
    p = np.exp(x - top[:, None])
    return np.einsum("hn,nhd->hd", p / (p.sum(1) + np.exp(sinks - top))[:, None], v)


def whole(n: int = LENGTH, s: int = 0) -> list[tuple[int, int]]:
    return [(s, i) for i in range(n)]


def expect(h: History, how: Setting, tokens: Sequence[int] = range(0, LENGTH, 23)) -> None:
    result = attend([h], [(0, i) for i in tokens], how, CPU2)
    assert nmse(result, np.stack([formula(h, i, how) for i in tokens])) < 1e-12


# --- values -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("case", [c for c in CASES if c.op in ("flash_attn_ext", "soft_max")], ids=str)
def test_case(case: Case) -> None:
    for present in sizes_of(CPU, case):
        result = run_case(CPU, case, present)
        assert not CPU.fallback
        assert nmse(result, run_case(REF, case, present)) < 1e-12
        assert np.array_equal(result, run_case(CPU2, case, present))


@pytest.mark.parametrize("types", [(F32, F32), (F16, F16), (BF16, BF16), (Q8_0, Q8_0), (Q4_0, Q4_0), (Q4_1, Q5_0),
                                   (Q5_1, IQ4_NL)], ids=str)
def test_types_of_the_cache(types: tuple[DType, DType]) -> None:
    expect(History.random(types=types, heads=(4, 2)), Setting(types, shuffled=True))


@pytest.mark.parametrize("d", [(16, 16), (32, 32), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (40, 24),
                               (33, 47)], ids=str)
def test_sizes_of_heads(d: tuple[int, int]) -> None:
    expect(History.random(d=d, heads=(4, 2)), Setting())


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (5, 1), (8, 1), (14, 2), (71, 1)], ids=str)
def test_groups_of_heads(heads: tuple[int, int]) -> None:
    expect(History.random(heads=heads, d=(32, 32)), Setting())


@pytest.mark.parametrize("how", [
    Setting(window=100), Setting(params={"logit_softcap": 3.0}), Setting(params={"scale": 0.5}),
    Setting(sinks=np.array([1.0, -3.0, 9.0], np.float32)), Setting(params={"max_bias": 8.0}, shuffled=True)],
    ids=["window", "softcap", "scale", "sinks", "alibi"])
def test_forms(how: Setting) -> None:
    expect(History.random(), how)


def test_alibi_of_streams() -> None:
    histories, how = [History.random(n=40) for _ in range(3)], Setting(params={"max_bias": 8.0}, shuffled=True, streams=True)
    result = attend(histories, [(s, i) for s in range(3) for i in (3, 39)], how)
    assert nmse(result, np.stack([formula(h, i, how) for h in histories for i in (3, 39)])) < 1e-12


def test_a_long_context() -> None:
    h, how = History.random(n=5000), Setting(size=6000, shuffled=True)
    expect(h, how, [0, 127, 4999])


def test_a_token_that_sees_nothing() -> None:
    h, how = History.random(n=40), Setting()
    for sinks in (None, np.zeros(3, np.float32)):
        node = make_node([h], whole(40), replace(how, sinks=sinks))
        spans = node.src[6]
        assert spans is not None
        spans.buffer.data.view(np.int32).reshape(4, 40)[2, 10:20] = 0
        result = evaluate(node, CPU2)[0]
        assert not result[10:20].any()
        assert np.array_equal(result[20:], attend([h], whole(40), replace(how, sinks=sinks))[20:])
        spans.buffer.data.view(np.int32).reshape(4, 40)[2] = 0
        assert not evaluate(node, CPU2).any()


def test_nan_stays_where_it_belongs() -> None:
    h = History.random(n=40)
    h.q[7, 1] = np.nan
    result = attend([h], whole(40), Setting())
    assert np.isnan(result[7, 1]).all()
    assert np.isnan(result).sum() == result[7, 1].size


def test_no_tokens() -> None:
    q, k = tensor(np.zeros((1, 0, 2, 64), np.float32)), tensor(normal(1, 1, 8, 64))
    assert evaluate(ops.flash_attn_ext(ops.permute(q, (0, 2, 1, 3)), k, k, None, scale=1.0), CPU2).size == 0


# --- the same bits ------------------------------------------------------------------------------------------------

PLACES = [0, 1, 14, 15, 16, 17, 63, 64, 126, 127, 128, 129, 200, 255, 256, 257, 298, 299]
H = [History.random(heads=(6, 2)) for _ in range(2)]
ALONE = [np.concatenate([attend([h], [(0, i)], Setting()) for i in PLACES]) for h in H]


def at_places(result: Array) -> Array:
    return result[PLACES]


def same(result: Array, s: int = 0) -> bool:
    return np.array_equal(result.view(np.uint32), ALONE[s].view(np.uint32))


@pytest.mark.parametrize("n_threads", [1, 2, 3, 5])
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_prompt_equals_token_by_token(n_threads: int, shuffled: bool) -> None:
    assert same(at_places(attend(H[:1], whole(), Setting(shuffled=shuffled), Native(n_threads))))


@pytest.mark.parametrize("n", [2, 7, 64, 129])
def test_size_of_ubatches(n: int) -> None:
    parts = [attend(H[:1], whole()[i:i + n], Setting(), CPU2) for i in range(0, LENGTH, n)]
    assert same(at_places(np.concatenate(parts)))


@pytest.mark.parametrize("room", [0, 1 << 30])
def test_sharing_chunks_or_tiles(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room for the states of chunks each tile is one thread's."""
    monkeypatch.setattr(ops_attention, "PARTS_BYTES", room)
    assert same(at_places(attend(H[:1], whole(), Setting(), CPU2)))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_any_mixture_of_two_sequences(seed: int) -> None:
    tokens = [*whole(), *whole(s=1)]
    tokens = [tokens[i] for i in np.random.default_rng(seed).permutation(len(tokens))[:200]]
    result = attend(H, tokens, Setting(shuffled=seed % 2 == 0), CPU2)
    for s in range(2):
        expected = dict(zip(PLACES, ALONE[s]))
        assert all(np.array_equal(x, expected[i]) for x, (t, i) in zip(result, tokens) if t == s and i in expected)


@pytest.mark.parametrize("n", [1, LENGTH])
def test_streams_equal_one_pool(n: int) -> None:
    tokens = [(s, i) for s in range(2) for i in range(LENGTH - n, LENGTH)]
    result = attend(H, tokens, Setting(streams=True, shuffled=True), CPU2).reshape(2, n, 6, 64)
    pool = attend(H, tokens, Setting(), CPU2).reshape(2, n, 6, 64)
    assert np.array_equal(result, pool)
    assert all(np.array_equal(result[s, -1], ALONE[s][-1]) for s in range(2))


def test_what_a_window_gave_away_changes_nothing() -> None:
    """Chunks are cut at positions: not at entries of a list that has lost its first ones."""
    h, how = H[0], Setting(window=90)
    late = History(h.q[150:], h.k[150:], h.v[150:], first=150)
    tokens = range(240, 300)
    full = attend([h], [(0, i) for i in tokens], how, CPU2)
    assert np.array_equal(full, attend([late], [(0, i - 150) for i in tokens], how, CPU2))
    assert all(np.array_equal(full[i - 240], attend([h], [(0, i)], how)[0]) for i in (240, 270, 299))


@pytest.mark.parametrize("types", [(F32, F32), (Q8_0, Q8_0)], ids=str)
def test_other_types_are_as_steady(types: tuple[DType, DType]) -> None:
    h, how = History.random(types=types, heads=(4, 2)), Setting(types, sinks=normal(4), window=170)
    prompt = attend([h], whole(), replace(how, shuffled=True), CPU2)
    for i in (0, 16, 127, 128, 299):
        assert np.array_equal(prompt[i], attend([h], [(0, i)], how)[0])


# --- lowerings ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("lowering", [name for name in ("avx2", "generic") if name in targets.runnable()])
def test_other_lowerings(lowering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGRAPH_CPU", lowering)
    h = History.random(heads=(8, 2))
    result = attend([h], whole(), Setting(), CPU2)
    assert nmse(result, np.stack([formula(h, i, Setting()) for i in range(LENGTH)])) < 1e-12
    assert np.array_equal(result[-1], attend([h], [(0, LENGTH - 1)], Setting())[0])


def test_products_are_fused_on_neon() -> None:
    assembly = ops_attention._attend("F16", True, "F16", True).assembly(targets.LEAST["neon"])
    assert assembly.count("fmla") > 100


# --- the unfused form ---------------------------------------------------------------------------------------------

@pytest.fixture
def strided(monkeypatch: pytest.MonkeyPatch) -> None:
    """mul_mat always by rows, whatever else could compute it."""
    table: Any = sys.modules["ggraph.backends.cpu.lower"]
    monkeypatch.setitem(table.LOWERINGS, ("mul_mat",), ops_attention.strided_mul_mat)


@pytest.mark.usefixtures("strided")
@pytest.mark.parametrize("type", [F32, F16, BF16, Q8_0], ids=str)
@pytest.mark.parametrize("m", [1, 5, 70])
def test_keys_times_queries(type: DType, m: int) -> None:
    k = quants.unpack(quants.pack(normal(2, 100, 3, 96), type), type)
    leaf = tensor(quants.pack(k, type), type)
    q = normal(2, 6, m, 96)
    node = ops.mul_mat(ops.permute(leaf, (0, 2, 1, 3)), tensor(q))
    result = evaluate(node, CPU)
    assert not CPU.fallback
    expected = np.einsum("snhd,shgtd->shgtn", k.astype(np.float64), q.reshape(2, 3, 2, m, 96).astype(np.float64))
    assert nmse(result, expected.reshape(2, 6, m, 100)) < 1e-12
    assert np.array_equal(result, evaluate(node, CPU2))


@pytest.mark.usefixtures("strided")
@pytest.mark.parametrize("n, k", [(64, 700), (1, 1), (17, 256), (130, 33)])
def test_values_times_weights(n: int, k: int) -> None:
    v, p = normal(2, n, k).astype(np.float16), normal(4, 50, k)
    node = ops.mul_mat(tensor(v.view(np.uint8), F16), tensor(p))
    result = evaluate(node, CPU2)
    assert not CPU2.fallback
    expected = np.repeat(v.astype(np.float64), 2, 0) @ p.astype(np.float64).swapaxes(-1, -2)
    assert nmse(result[0], expected.swapaxes(-1, -2)) < 1e-12
    alone = ops.mul_mat(tensor(v.view(np.uint8), F16), tensor(p[:, 30:31]))
    assert np.array_equal(result[0, :, 30], evaluate(alone, CPU)[0, :, 0])


@pytest.mark.usefixtures("strided")
def test_columns_of_a_matrix_run_through_ref() -> None:
    evaluate(ops.mul_mat(ops.transpose(tensor(normal(8, 8))), tensor(normal(3, 8))), CPU)
    assert CPU.fallback == ["mul_mat"]


# --- soft_max -----------------------------------------------------------------------------------------------------

@settings(max_examples=25, deadline=None)
@given(st.integers(1, 70), st.integers(1, 5), st.booleans(), st.floats(-2, 2, width=32))
def test_softmax_of_any_width(n: int, m: int, masked: bool, scale: float) -> None:
    x, mask = tensor(normal(2, 3, m, n)), np.where(RNG.random((2, 1, m, n)) < 0.4, -np.inf, 0).astype(np.float32)
    node = ops.soft_max(x, tensor(mask) if masked else None, None, scale)
    result = evaluate(node, CPU)
    assert not CPU.fallback
    assert nmse(result, evaluate(node, REF)) < 1e-12
    assert np.array_equal(result, evaluate(node, CPU2))


def test_padding_changes_no_bit_of_a_softmax() -> None:
    x = normal(4, 100)
    padded = np.full((4, 256), -np.inf, np.float32)
    padded[:, :100] = x
    assert np.array_equal(evaluate(ops.soft_max(tensor(padded)), CPU)[..., :100], evaluate(ops.soft_max(tensor(x)), CPU))


def test_softmax_keeps_nan() -> None:
    x = normal(2, 40)
    x[1, 39] = np.nan
    result = evaluate(ops.soft_max(tensor(x)), CPU)[0, 0]
    assert np.isfinite(result[0]).all() and np.isnan(result[1]).all()
