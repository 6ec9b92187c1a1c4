"""The vector vocabulary on every lowering that runs here, against NumPy."""
from __future__ import annotations

from collections.abc import Callable
from math import erf
from typing import Any

import numpy as np
import pytest

from ggraph.backends.cpu import targets
from ggraph.backends.cpu.kernel import inline, kernel, simd, template, vmath
from tests.backends.cpu.native import call

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

Array = Any
RNG = np.random.default_rng(11)
F32 = RNG.standard_normal(160).astype(np.float32)


@pytest.fixture(params=targets.runnable(), autouse=True)
def lowering(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("GGRAPH_CPU", request.param)
    return str(request.param)


# Memory and conversions. The bodies walk [src][dst][n], or what their comment says.

@template
def convert(load: str, store: str):
    read, write = getattr(simd, load), getattr(simd, store)

    def body(p, ith, nth):
        for i in range(simd.word(p, 2)):
            write(simd.word(p, 1) + simd.word(p, 4) * i, read(simd.word(p, 0) + simd.word(p, 3) * i))
    return body


def _convert(load: str, store: str, x: Array, to: Any, lanes: int) -> Array:
    out = np.zeros(x.size, to)
    call(convert(load, store), x, out, x.size // lanes, lanes * x.itemsize, lanes * out.itemsize)
    return out


def _same_floats(a: Array, b: Array) -> bool:
    return bool((np.isnan(a) == np.isnan(b)).all()) and np.array_equal(a[~np.isnan(a)], b[~np.isnan(b)])


EVERY_16 = np.arange(65536, dtype=np.uint16)


def test_every_f16_and_bf16_becomes_its_f32() -> None:
    for suffix, expected in (("f16", EVERY_16.view(np.float16).astype(np.float32)),
                             ("bf16", (EVERY_16.astype(np.uint32) << 16).view(np.float32))):
        assert _same_floats(_convert(f"load_{suffix}", "store_f32", EVERY_16, np.float32, 16), expected)
        assert _same_floats(_convert(f"get_{suffix}", "put_f32", EVERY_16[::7].copy(), np.float32, 1), expected[::7])


def _awkward() -> Array:
    """Floats at, just above, just below and half-way between f16 and bf16 values, and random bits."""
    halves = EVERY_16.view(np.float16).astype(np.float32)
    halves = halves[np.isfinite(halves)]
    middles = (halves + np.nextafter(halves.astype(np.float16), np.float16(np.inf)).astype(np.float32)) / 2
    near = np.concatenate([halves, middles])
    bits = RNG.integers(0, 2**32, 1 << 16, np.uint32).view(np.float32)
    bf16 = ((EVERY_16.astype(np.uint32) << 16) + 0x8000).view(np.float32)
    x = np.concatenate([near, np.nextafter(near, np.float32(9e9)), np.nextafter(near, np.float32(-9e9)), bits, bf16])
    return x[:x.size // 16 * 16].astype(np.float32)


@np.errstate(all="ignore")
def test_f32_rounds_to_f16_and_bf16_as_ieee_says() -> None:
    x = _awkward()
    got = _convert("load_f32", "store_f16", x, np.uint16, 16).view(np.float16)
    assert _same_floats(got.astype(np.float32), x.astype(np.float16).astype(np.float32))
    got = (_convert("load_f32", "store_bf16", x, np.uint16, 16).astype(np.uint32) << 16).view(np.float32)
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32)).view(np.float32)
    assert _same_floats(got[~np.isnan(x)], rounded[~np.isnan(x)]) and np.isnan(got[np.isnan(x)]).all()


@pytest.mark.parametrize("name, to", [("i32", np.int32), ("i8", np.int8), ("u8", np.uint8), ("u16", np.uint16)])
def test_integers(name: str, to: type) -> None:
    x: Array = RNG.integers(0, 256, 64 * np.dtype(to).itemsize, np.uint8).view(to)
    assert np.array_equal(_convert(f"load_{name}", "store_i32", x, np.int32, 16), x)
    assert np.array_equal(_convert("load_i32", f"store_{name}", x.astype(np.int32), to, 16), x)
    assert np.array_equal(_convert(f"get_{name}", "put_i64", x, np.int64, 1), x)


@template
def part(kind: str):
    load, store = getattr(simd, f"load_{kind}_n"), getattr(simd, f"store_{kind}_n")

    def body(p, ith, nth):
        x = load(simd.word(p, 0), simd.word(p, 2))
        store(simd.word(p, 1), x + 1, simd.word(p, 2))
        simd.put_f32(simd.word(p, 3), float(simd.hsum(x)))
    return body


@pytest.mark.parametrize("kind, to", [("f32", np.float32), ("f16", np.float16), ("u8", np.uint8)])
@pytest.mark.parametrize("n", [0, 1, 7, 15, 16])
def test_the_first_n_lanes(kind: str, to: type, n: int) -> None:
    x: Array = np.arange(1, 17).astype(to)
    out, total = np.zeros_like(x), np.zeros(1, np.float32)
    call(part(kind), x[:n].copy(), out, n, total)
    assert np.array_equal(out, np.where(np.arange(16) < n, x + 1, 0)) and total[0] == n * (n + 1) / 2


@kernel
def scalars(p, ith, nth):
    simd.put_f32(simd.word(p, 0), simd.f32(p, 1) + simd.word(p, 2))


def test_words_and_scalars_of_a_block() -> None:
    out = np.zeros(1, np.float32)
    call(scalars, out, int(np.float32(-2.5).view(np.uint32)), -7)
    assert out[0] == -9.5


# Arithmetic.

BINARY: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "add": (lambda a, b: a + b, np.add), "sub": (lambda a, b: a - b, np.subtract),
    "mul": (lambda a, b: a * b, np.multiply), "div": (lambda a, b: a / b, np.divide),
    "max": (lambda a, b: simd.maximum(a, b), np.maximum), "min": (lambda a, b: simd.minimum(a, b), np.minimum),
    "less": (lambda a, b: simd.select(a < b, a, b * 2.0), lambda a, b: np.where(a < b, a, b * 2)),
    "unary": (lambda a, b: simd.sqrt(simd.absolute(a)) - simd.floor(b), lambda a, b: np.sqrt(np.abs(a)) - np.floor(b)),
    "nearest": (lambda a, b: simd.nearest(a * 2.0) + -b, lambda a, b: np.rint(a * 2) - b),
    "scalar": (lambda a, b: 1.5 - a * 3 + b, lambda a, b: np.float32(1.5) - a * np.float32(3) + b),
    "integer": (lambda a, b: simd.to_f32((simd.to_i32(a * 100.0) >> 1 & 255) - (simd.to_i32(b) << 3 | 5)),
                lambda a, b: ((a * 100).astype(np.int32) >> 1 & 255) - (b.astype(np.int32) << 3 | 5)),
}


@template
def binary(name: str):
    fn = inline(BINARY[name][0])

    def body(p, ith, nth):
        for i in range(0, 4 * simd.word(p, 3), 64):
            simd.store_f32(simd.word(p, 2) + i, fn(simd.load_f32(simd.word(p, 0) + i), simd.load_f32(simd.word(p, 1) + i)))
    return body


@pytest.mark.parametrize("name", BINARY)
def test_arithmetic_is_numpys(name: str) -> None:
    a, b, out = F32, F32[::-1].copy(), np.zeros_like(F32)
    call(binary(name), a, b, out, a.size)
    assert np.array_equal(out, BINARY[name][1](a, b).astype(np.float32))


@kernel
def fused(p, ith, nth):
    a = simd.load_f32(simd.word(p, 0))
    simd.store_f32(simd.word(p, 1), simd.fma(a, a, simd.splat_f32(-1.0)))


def test_fma_rounds_once_where_the_machine_can(lowering: str) -> None:
    x, out = F32[:16].copy(), np.zeros(16, np.float32)
    call(fused, x, out)
    once = (x.astype(np.float64) ** 2 - 1).astype(np.float32)
    assert np.array_equal(out, x * x - 1 if lowering == "generic" else once)


@kernel
def folds(p, ith, nth):
    x = simd.load_f32(simd.word(p, 0))
    simd.put_f32(simd.word(p, 1), simd.hsum(x))
    simd.put_f32(simd.word(p, 1) + 4, simd.hmax(x))
    simd.put_f32(simd.word(p, 1) + 8, 1.0 if simd.any_lane(x > 5.0) else 0.0)
    simd.put_f32(simd.word(p, 1) + 12, float(simd.hsum(simd.to_i32(x * 1000.0))))


def test_folds_are_trees() -> None:
    x, out = F32[:16].copy(), np.zeros(4, np.float32)
    call(folds, x, out)
    tree = x
    while tree.size > 1:
        tree = tree[:tree.size // 2] + tree[tree.size // 2:]
    assert out.tolist() == [tree[0], x.max(), 0.0, (x * 1000).astype(np.int32).sum()]


# Bytes.

@template
def dot(name: str):
    fn = getattr(simd, name)

    def body(p, ith, nth):
        acc = fn(simd.load_i32(simd.word(p, 3)), simd.load_bytes(simd.word(p, 0)), simd.load_bytes(simd.word(p, 1)))
        simd.store_i32(simd.word(p, 2), acc)
    return body


@pytest.mark.parametrize("name, top", [("dot4", 255), ("dot4_small", 127)])
def test_dot4_is_exact_up_to_the_ends(name: str, top: int) -> None:
    for s in (RNG.integers(-128, 128, 64), np.full(64, -128), np.full(64, 127), np.tile([127, -128], 32)):
        for u in (RNG.integers(0, top + 1, 64), np.full(64, top), np.tile([top, 0, top, top], 16)):
            acc, out = RNG.integers(-2**30, 2**30, 16).astype(np.int32), np.zeros(16, np.int32)
            call(dot(name), u.astype(np.uint8), s.astype(np.int8), out, acc)
            assert np.array_equal(out, acc + (u * s).reshape(16, 4).sum(1))


TABLE = tuple(int(v) for v in RNG.integers(-128, 128, 16))


@template
def looked_up():
    entries = simd.table(*TABLE)

    def body(p, ith, nth):
        low = simd.load_bytes(simd.word(p, 0)) & 15
        high = simd.load_bytes(simd.word(p, 0)) >> 4
        simd.store_bytes(simd.word(p, 1), simd.lookup(entries(), low))
        simd.store_bytes(simd.word(p, 1) + 64, simd.lookup(entries(), high))
        simd.store_bytes(simd.word(p, 1) + 128, simd.spread4(simd.word(p, 0)))
    return body


def test_lookup_and_spread() -> None:
    x, out = RNG.integers(0, 256, 64, np.uint8), np.zeros((3, 64), np.int8)
    call(looked_up(), x, out)
    entries = np.array(TABLE, np.int8)
    assert np.array_equal(out, np.stack([entries[x & 15], entries[x >> 4], np.tile(x[:4], 16).view(np.int8)]))


# Elementary functions: error in units of the last place, over a fine grid and at the edges.

FUNCTIONS: dict[str, tuple[Callable[[Array], Array], float, float, float]] = {
    "exp": (np.exp, -104, 89, 1.1),
    "log": (np.log, 1e-45, 3e38, 1.1),
    "tanh": (np.tanh, -12, 12, 2.1),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), -80, 30, 3.0),
    "silu": (lambda x: x / (1 + np.exp(-x)), -80, 30, 3.0),
}


@template
def function(name: str):
    fn = getattr(vmath, name)

    def body(p, ith, nth):
        for i in range(0, 4 * simd.word(p, 2), 64):
            simd.store_f32(simd.word(p, 1) + i, fn(simd.load_f32(simd.word(p, 0) + i)))
    return body


def _apply(name: str, x: Array) -> Array:
    out = np.zeros_like(x)
    call(function(name), x, out, x.size)
    return out


def _grid(low: float, high: float) -> Array:
    n = 1 << 17
    if low > 0:
        return np.geomspace(low, high, n).astype(np.float32)
    small = np.geomspace(1e-30, min(-low, high), n // 4).astype(np.float32)
    return np.concatenate([np.linspace(low, high, n // 2).astype(np.float32), small, -small])


@np.errstate(all="ignore")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_elementary_functions(name: str, lowering: str) -> None:
    exact, low, high, ulps = FUNCTIONS[name]
    x = _grid(low, high)
    out, true = _apply(name, x), exact(x.astype(np.float64))
    rounded = true.astype(np.float32)
    ok = np.isfinite(rounded) & (np.abs(rounded) > 1e-38)
    error = np.abs(out[ok] - true[ok]) / np.spacing(np.abs(rounded[ok]))
    assert error.max() <= ulps * (1.6 if lowering == "generic" else 1)          # no fma: rounds twice
    assert np.abs(out[~ok & np.isfinite(rounded)]).max(initial=0) < 2e-38
    assert np.array_equal(out[np.isinf(rounded)], rounded[np.isinf(rounded)])


ERF: Callable[[Array], Array] = np.vectorize(erf)
ABSOLUTE: dict[str, tuple[Callable[[Array], Array], float]] = {
    "erf": (ERF, 5e-7),
    "gelu": (lambda x: x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x ** 3))), 2e-6),
    "gelu_erf": (lambda x: x / 2 * (1 + ERF(x / 2 ** 0.5)), 2e-6),
    "gelu_quick": (lambda x: x / (1 + np.exp(-1.702 * x)), 2e-6),
}


@pytest.mark.parametrize("name", ABSOLUTE)
def test_functions_with_an_absolute_error(name: str) -> None:
    exact, bound = ABSOLUTE[name]
    x = np.linspace(-8, 8, 4096, dtype=np.float32)
    assert np.abs(_apply(name, x) - exact(x.astype(np.float64))).max() <= bound


def test_the_edges_of_functions() -> None:
    inf, nan = np.inf, np.nan
    x = np.array([0.0, -0.0, inf, -inf, nan, 1e-45, 200.0, -200.0] * 2, np.float32)
    assert _same_floats(_apply("exp", x)[:8], np.array([1, 1, inf, 0, nan, 1, inf, 0], np.float32))
    assert _same_floats(_apply("tanh", x)[:8], np.array([0, 0, 1, -1, nan, 1e-45, 1, -1], np.float32))
    assert _same_floats(_apply("log", x)[:5], np.array([-inf, -inf, inf, nan, nan], np.float32))


def test_erf_is_one_where_it_rounds_to_one() -> None:
    x = np.array([3.925, 4.0, 13.0, np.inf, -3.925, -np.inf, np.nan, 0.0] * 2, np.float32)
    assert _same_floats(_apply("erf", x)[:8], np.array([1, 1, 1, 1, -1, -1, np.nan, 0], np.float32))
    assert not _apply("gelu_erf", np.linspace(-20, -5.6, 64, dtype=np.float32)).any()
