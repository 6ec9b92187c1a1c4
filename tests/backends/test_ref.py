"""The reference kernels against formulas and numbers that stand on their own, in float64 or by hand.

Rope, attention and recurrences are in test_ref_sequence.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ggraph import dtypes, ops, quants
from ggraph.backend import HostBuffer, open_backend
from ggraph.backends.ref import Ref
from ggraph.dtypes import BF16, F16, F32, I32, Q4_0, Q8_0, DType
from ggraph.errors import Aborted, BackendError
from ggraph.size import Size
from ggraph.tensor import Tensor, leaf
from tests.backends.opcase import SMALLER, nodes_of, random_blocks, run_case, sizes_of
from tests.backends.optable import CASES, WEIGHTS, Case
from tests.backends.small import INF, REF, RNG, close, evaluate, normal, tensor, value

Array = Any


# --- plans --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("case", [c for c in CASES if len(sizes_of(REF, c)) > 1], ids=str)
def test_a_resized_plan_equals_one_built_at_that_size(case: Case) -> None:
    for sizes in SMALLER:
        np.testing.assert_array_equal(run_case(REF, case, sizes), run_case(REF, case, sizes, built=sizes))


def test_a_size_of_zero_runs() -> None:
    n = Size.variable("n", 4)
    x = tensor(normal(4, 64))
    x.ne = (64, n, 1, 1)
    out = ops.mul_mat(tensor(normal(5, 64), Q8_0), ops.rms_norm(x, 1e-5))
    nodes = nodes_of(out)
    for node in nodes:
        node.buffer = REF.alloc(int(node.nbytes))
    plan = REF.compile(nodes)
    plan.resize({"n": 0})
    plan.run()
    assert plan.read(out).shape == (1, 1, 0, 5)


def test_abort_stops_before_the_next_node_and_only_once() -> None:
    x = tensor(normal(8))
    chain = ops.exp(ops.neg(x))
    nodes = nodes_of(chain)
    for node in nodes:
        node.buffer = REF.alloc(int(node.nbytes))
    plan, seen = REF.compile(nodes), []

    def stop(node: Tensor) -> None:
        seen.append(node.op)
        plan.abort()
    with pytest.raises(Aborted):
        plan.run(on_node=stop)
    assert seen == ["neg"]
    plan.run(on_node=lambda node: seen.append(node.op))
    assert seen == ["neg", "neg", "exp"]


def test_a_hook_sees_and_replaces_a_node() -> None:
    x = tensor([1.0, 2.0])
    chain = ops.neg(ops.sqr(x))
    nodes = nodes_of(chain)
    for node in nodes:
        node.buffer = REF.alloc(int(node.nbytes))
    plan = REF.compile(nodes)

    def replace(node: Tensor) -> None:
        if node.op == "sqr":
            assert plan.read(node).tolist() == [[[[1, 4]]]]
            plan.write(node, np.full((1, 1, 1, 2), 7, np.float32))
    plan.run(on_node=replace)
    assert plan.read(chain).tolist() == [[[[-7, -7]]]]


def test_packed_weights_are_unpacked_once_and_forgotten_on_close() -> None:
    backend = Ref()
    weight, x = tensor(normal(4, 32), Q8_0), tensor(normal(3, 32))
    rows, product = ops.get_rows(weight, tensor([1])), ops.mul_mat(weight, x)
    backend.pack([weight])
    for node in (rows, product):
        node.buffer = backend.alloc(int(node.nbytes))
    backend.compile([rows]).run()
    assert backend.unpacked[weight] is None             # get_rows unpacks only its rows
    backend.compile([product]).run()
    kept = backend.unpacked[weight]
    backend.compile([product]).run()
    assert kept is not None and backend.unpacked[weight] is kept
    backend.close()
    assert not backend.unpacked


def test_the_backend_opens_by_name_and_knows_what_it_has() -> None:
    backend = open_backend("ref")
    assert backend.name == "ref" and backend.host
    assert backend.supports(ops.neg(leaf(F32, (3,), "x")))
    assert not backend.supports(Tensor("no_such_op", F32, (3,)))
    buffer = backend.alloc(64)
    assert buffer.address % 64 == 0 and buffer.nbytes == 64
    backend.upload(buffer, 8, np.arange(4, dtype=np.int32))
    assert backend.download(buffer, 12, 4).view(np.int32).tolist() == [1]


@pytest.mark.parametrize("make", [
    lambda: ops.get_rows(tensor(normal(3, 4)), tensor([0, 3])),
    lambda: ops.get_rows(tensor(normal(3, 4)), tensor([-1])),
    lambda: ops.set_rows(tensor(normal(3, 4)), tensor(normal(1, 4)), tensor([3])),
    lambda: ops.mul_mat_id(tensor(normal(2, 3, 4)), tensor(normal(1, 1, 4)), tensor([[2]])),
    lambda: ops.add_id(tensor(normal(1, 1, 4)), tensor(normal(2, 4)), tensor([[-1]]))])
def test_a_row_number_out_of_range_is_an_error(make: Callable[[], Tensor]) -> None:
    with pytest.raises(BackendError, match="row numbers"):
        evaluate(make())


# --- moving -------------------------------------------------------------------------------------------------------

def test_copies_follow_strides() -> None:
    x = normal(2, 3, 4, 5)
    got = evaluate(ops.cont(ops.permute(tensor(x), (2, 0, 3, 1))))      # axis 0 becomes axis 2, ..
    np.testing.assert_array_equal(got, np.einsum("wzyx->zxwy", x))
    dst = tensor(np.zeros((6, 4)))
    evaluate(ops.cpy(tensor(np.arange(4.0)), ops.view(dst, (1, 4), (dst.nb[1],), offset=4 * 5)))
    got = dst.buffer.data.view(np.float32).reshape(6, 4)
    assert got[1:5, 1].tolist() == [0, 1, 2, 3] and got.sum() == 6


@pytest.mark.parametrize("type", [F16, BF16, Q8_0, Q4_0])
def test_a_copy_of_the_same_type_keeps_the_bits(type: DType) -> None:
    x = tensor(normal(3, 2, 64), type)
    node = ops.cont(ops.permute(x, (0, 2, 1, 3)))
    evaluate(node)
    bits = x.buffer.data.reshape(3, 2, -1)
    np.testing.assert_array_equal(node.buffer.data.reshape(2, 3, -1), bits.swapaxes(0, 1))


def test_casts_round_and_truncate() -> None:
    assert evaluate(ops.cast(tensor([1 + 2 ** -12, 70000.0]), F16)).tolist() == [1, INF]
    assert evaluate(ops.cast(tensor([1 + 2 ** -9]), BF16)).tolist() == [1]
    assert evaluate(ops.cast(tensor([-1.9, 2.9]), I32)).tolist() == [-1, 2]
    assert evaluate(ops.cast(tensor([3, -4]), F32)).tolist() == [3, -4]


@pytest.mark.parametrize("type", WEIGHTS, ids=str)
def test_get_rows_unpacks_the_rows_asked_for(type: DType) -> None:
    x = leaf(type, (256, 5), "x")
    raw = random_blocks(type, 5 * 256 // type.block, RNG).reshape(5, -1)
    x.buffer = HostBuffer(raw.reshape(-1))
    np.testing.assert_array_equal(evaluate(ops.get_rows(x, tensor([4, 0, 4]))), quants.unpack(raw[[4, 0, 4]], type))


def test_get_rows_of_each_batch() -> None:
    x, index = normal(2, 3, 5, 4), RNG.integers(0, 5, (2, 3, 7))
    got = evaluate(ops.get_rows(tensor(x), tensor(index)))
    assert all((got[i, j, k] == x[i, j, index[i, j, k]]).all() for i in range(2) for j in range(3) for k in range(7))


@pytest.mark.parametrize("type", [F32, F16, BF16, Q8_0, Q4_0])
def test_set_rows_writes_only_the_rows_named(type: DType) -> None:
    dst, x = tensor(normal(6, 64), type), normal(2, 64)
    before = dst.buffer.data.reshape(6, -1).copy()
    evaluate(ops.set_rows(dst, tensor(x), tensor([4, 1])))
    after = dst.buffer.data.reshape(6, -1)
    np.testing.assert_array_equal(after[[4, 1]], quants.pack(x, type))
    np.testing.assert_array_equal(after[[0, 2, 3, 5]], before[[0, 2, 3, 5]])


def test_set_rows_shares_row_numbers_between_batches() -> None:
    dst = tensor(np.zeros((2, 2, 4, 1)))
    evaluate(ops.set_rows(dst, tensor(np.arange(4.0).reshape(2, 2, 1, 1) + 1), tensor([[2]])))
    assert dst.buffer.data.view(np.float32).reshape(2, 2, 4)[..., 2].tolist() == [[1, 2], [3, 4]]


def test_shapes_by_hand() -> None:
    x = np.array([[1.0, 2, 3], [4, 5, 6]])
    assert evaluate(ops.concat(tensor(x), tensor([[7.0], [8]]), 0)).tolist() == [[1, 2, 3, 7], [4, 5, 6, 8]]
    assert evaluate(ops.concat(tensor(x), tensor(x), 1)).tolist() == [*x.tolist(), *x.tolist()]
    assert evaluate(ops.repeat(tensor([[1.0], [2]]), (2, 4))).tolist() == [[1, 1], [2, 2], [1, 1], [2, 2]]
    assert evaluate(ops.fill(tensor(x), 0.5)).tolist() == [[0.5] * 3] * 2
    assert evaluate(ops.arange(1, 2.6, 0.5)).tolist() == [1, 1.5, 2, 2.5]
    assert evaluate(ops.pad(tensor([[1.0, 2]]), (1, 1), (2,))).tolist() == [[0, 0, 1, 2, 0], [0] * 5]
    assert evaluate(ops.roll(tensor(x), (1, 1))).tolist() == [[6, 4, 5], [3, 1, 2]]
    assert evaluate(ops.diag(tensor([3.0, 4]))).tolist() == [[3, 0], [0, 4]]
    square = tensor(np.arange(1.0, 10).reshape(3, 3))
    assert evaluate(ops.tri(square, lower=True, diag=True)).tolist() == [[1, 0, 0], [4, 5, 0], [7, 8, 9]]
    assert evaluate(ops.tri(square, lower=False, diag=False)).tolist() == [[0, 2, 3], [0, 0, 6], [0, 0, 0]]
    assert evaluate(ops.pool_1d(tensor([[1.0, 5, 2, -INF, -INF, -INF]]), 3)).tolist() == [5, -INF]


# --- matrix products ----------------------------------------------------------------------------------------------

@pytest.fixture(params=["ggml", "exact"])
def seen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Array, DType], Array]:
    """How products with a type see the other operand, for both values of GGRAPH_REF."""
    monkeypatch.setenv("GGRAPH_REF", request.param)
    return lambda x, type: value(x, quants.dot_type(type) if request.param == "ggml" else F32)


@pytest.mark.parametrize("type", WEIGHTS, ids=str)
def test_mul_mat_is_the_product_with_the_unpacked_weight(type: DType, seen: Callable[[Array, DType], Array]) -> None:
    a = leaf(type, (256, 6), "a")
    a.buffer = HostBuffer(random_blocks(type, 6 * 256 // type.block, RNG).reshape(-1))
    b = normal(3, 256)
    unpacked = quants.unpack(a.buffer.data.reshape(6, -1), type).astype(np.float64)
    close(evaluate(ops.mul_mat(a, tensor(b))), seen(b, type) @ unpacked.T)


def test_an_operand_of_the_dot_type_is_not_rounded_again() -> None:
    a, b = normal(6, 64), normal(3, 64)
    close(evaluate(ops.mul_mat(tensor(a, Q8_0), tensor(b, Q8_0))), value(b, Q8_0) @ value(a, Q8_0).T)


def test_mul_mat_repeats_the_weight_for_neighbours() -> None:
    a, b = normal(1, 2, 5, 8), normal(3, 6, 4, 8)
    close(evaluate(ops.mul_mat(tensor(a), tensor(b))), np.einsum("hnk,shmk->shmn", np.repeat(a[0], 3, axis=0), b))


@pytest.mark.parametrize("type", [F32, Q8_0, dtypes.Q4_K])
def test_mul_mat_id_takes_the_expert_of_each_slot(type: DType, seen: Callable[[Array, DType], Array]) -> None:
    a = leaf(type, (256, 3, 4), "a")
    a.buffer = HostBuffer(random_blocks(type, 12 * 256 // type.block, RNG).reshape(-1))
    experts = quants.unpack(a.buffer.data.reshape(4, 3, -1), type).astype(np.float64)
    b, ids = normal(5, 2, 256), RNG.integers(0, 4, (5, 2))
    x = seen(b, type)
    close(evaluate(ops.mul_mat_id(a, tensor(b), tensor(ids))), np.einsum("tunk,tuk->tun", experts[ids], x))
    close(evaluate(ops.mul_mat_id(a, tensor(b[:, :1]), tensor(ids))), np.einsum("tunk,tk->tun", experts[ids], x[:, 0]))


def test_out_prod_and_solve_tri() -> None:
    a, b = normal(2, 3, 5), normal(4, 3, 7)
    close(evaluate(ops.out_prod(tensor(a), tensor(b))), np.einsum("hkn,hkm->hmn", np.repeat(a, 2, axis=0), b))
    m = np.tril(normal(2, 6, 6)) * 0.3 + np.eye(6, dtype=np.float32)
    x = evaluate(ops.solve_tri(tensor(m + np.triu(normal(6, 6), 1)), tensor(b2 := normal(2, 6, 4))))
    close(np.matmul(m, x), b2)


# --- element by element -------------------------------------------------------------------------------------------

def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def gelu(x: float) -> float:
    return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))


FORMULAS: dict[str, Callable[[float], float]] = {
    "abs": abs, "neg": lambda x: -x, "exp": math.exp, "expm1": math.expm1, "sqr": lambda x: x * x, "sin": math.sin,
    "cos": math.cos, "relu": lambda x: max(x, 0), "gelu": gelu, "sigmoid": sigmoid, "silu": lambda x: x * sigmoid(x),
    "gelu_erf": lambda x: x / 2 * math.erfc(-x / math.sqrt(2)), "gelu_quick": lambda x: x * sigmoid(1.702 * x),
    "tanh": math.tanh, "softplus": lambda x: math.log1p(math.exp(x)), "elu": lambda x: x if x > 0 else math.expm1(x),
    "step": lambda x: float(x > 0), "sgn": lambda x: float((x > 0) - (x < 0)),
    "hardsigmoid": lambda x: min(1, max(0, (x + 3) / 6)), "hardswish": lambda x: x * min(1, max(0, (x + 3) / 6))}
POSITIVE: dict[str, Callable[[float], float]] = {"log": math.log, "sqrt": math.sqrt}


def test_every_activation_has_a_formula_here() -> None:
    assert {*FORMULAS, *POSITIVE} == {*ops.UNARY}


@pytest.mark.parametrize("name", ops.UNARY)
def test_activations(name: str) -> None:
    x = np.concatenate([normal(200) * 4, [0.0, 1.0, -1.0, 12.5, -12.5]]).astype(np.float32)
    x = np.abs(x) + np.float32(0.01) if name in POSITIVE else x
    formula = {**FORMULAS, **POSITIVE}[name]
    close(evaluate(ops.OPS[name](tensor(x))), [formula(float(v)) for v in x], 1e-12)


def test_activations_at_the_ends() -> None:
    ends = tensor([-1e4, 1e4, -INF, INF])
    assert evaluate(ops.silu(tensor([-1e4, 1e4]))).tolist() == [0, 1e4]
    assert evaluate(ops.sigmoid(ends)).tolist() == [0, 1, 0, 1]
    assert evaluate(ops.softplus(ends)).tolist() == [0, 1e4, 0, INF]
    assert evaluate(ops.tanh(ends)).tolist() == [-1, 1, -1, 1]
    assert np.isnan(evaluate(ops.exp(tensor([math.nan])))).all()


@pytest.mark.parametrize(("name", "gate"), [("swiglu", "silu"), ("geglu", "gelu"), ("reglu", "relu"),
                                            ("geglu_erf", "gelu_erf"), ("geglu_quick", "gelu_quick")])
def test_gates(name: str, gate: str) -> None:
    g, u = normal(3, 40), normal(3, 40)
    close(evaluate(ops.OPS[name](tensor(g), tensor(u))), np.vectorize(FORMULAS[gate])(g.astype(np.float64)) * u)


def test_clamped_gates_by_hand() -> None:
    g, u = tensor([9.0, -9, 1]), tensor([9.0, -9, 2])
    close(evaluate(ops.swiglu_oai(g, u, 1.702, 7.0)),
          [7 * sigmoid(1.702 * 7) * 8, -9 * sigmoid(-1.702 * 9) * -6, sigmoid(1.702) * 3])
    close(evaluate(ops.swiglu_clamp(g, u, 7.0)), [7 * sigmoid(7) * 7, -9 * sigmoid(-9) * -7, sigmoid(1) * 2])


def test_arithmetic_repeats_the_second() -> None:
    a, b = normal(2, 4, 6), normal(2, 3)
    for name, f in {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}.items():
        np.testing.assert_array_equal(evaluate(ops.OPS[name](tensor(a), tensor(b))), f(a, np.tile(b, (2, 2, 2))[:, :4]))
    np.testing.assert_array_equal(evaluate(ops.scale(tensor(a), 2, 3)), a * 2 + 3)
    np.testing.assert_array_equal(evaluate(ops.clamp(tensor(a), -1, 0.5)), a.clip(-1, 0.5))
    ids = RNG.integers(0, 5, (4, 2))
    x, bias = normal(4, 2, 6), normal(5, 6)
    np.testing.assert_array_equal(evaluate(ops.add_id(tensor(x), tensor(bias), tensor(ids))), x + bias[ids])


# --- rows ---------------------------------------------------------------------------------------------------------

def test_norms() -> None:
    x = normal(3, 50) * 2 + 1
    y = x.astype(np.float64)
    centred = y - y.mean(-1, keepdims=True)
    close(evaluate(ops.norm(tensor(x), 1e-3)), centred / np.sqrt(y.var(-1, keepdims=True) + 1e-3))
    close(evaluate(ops.rms_norm(tensor(x), 1e-3)), y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-3))
    close(evaluate(ops.l2_norm(tensor(x), 1e-3)), y / np.sqrt((y * y).sum(-1, keepdims=True)))
    assert evaluate(ops.l2_norm(tensor([0.0, 3e-4, 4e-4]), 1e-3)) == pytest.approx([0, 0.3, 0.4])


def test_group_norm_takes_runs_of_channels() -> None:
    x = normal(2, 7, 3, 5)
    got = evaluate(ops.group_norm(tensor(x), 3, 1e-6))
    for start, stop in ((0, 3), (3, 6), (6, 7)):
        y = x[:, start:stop].astype(np.float64)
        y = y - y.mean((1, 2, 3), keepdims=True)
        close(got[:, start:stop], y / np.sqrt((y * y).mean((1, 2, 3), keepdims=True) + 1e-6))


def test_sums() -> None:
    x = normal(3, 50)
    y = x.astype(np.float64)
    close(evaluate(ops.sum_rows(tensor(x))), y.sum(-1, keepdims=True))
    close(evaluate(ops.mean(tensor(x))), y.mean(-1, keepdims=True))
    close(evaluate(ops.cumsum(tensor(x))), y.cumsum(-1))


def softmax(logits: Array, sinks: Array | None = None) -> Array:
    e = np.exp(np.asarray(logits, np.float64))
    return e / (e.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(np.asarray(sinks, np.float64))))


@pytest.mark.parametrize("n", [1, 8, 16])
def test_hadamard_is_a_matrix_of_signs(n: int) -> None:
    signs = [[(-1) ** (i & j).bit_count() for j in range(n)] for i in range(n)]
    x = normal(3, 2, 16)
    expected = x.reshape(3, 2, -1, n) @ np.array(signs) / math.sqrt(n)
    close(evaluate(ops.hadamard(tensor(x), n)), expected.reshape(x.shape))


def test_softmax_with_mask_sinks_and_scale() -> None:
    x, sinks = normal(2, 3, 4, 9), normal(3)
    mask = np.where(RNG.random((2, 1, 4, 9)) < 0.3, -INF, normal(2, 1, 4, 9))
    mask[..., 0] = 0
    close(evaluate(ops.soft_max(tensor(x))), softmax(x))
    close(evaluate(ops.soft_max(tensor(x), tensor(mask), scale=0.3)), softmax(x * 0.3 + mask))
    close(evaluate(ops.soft_max(tensor(x), tensor(mask, F16), tensor(sinks))),
          softmax(x + value(mask, F16), sinks.reshape(3, 1, 1)))
    assert evaluate(ops.soft_max(tensor([1e4, 1e4]))).tolist() == [0.5, 0.5]
    assert evaluate(ops.soft_max(tensor([1.0, 2]), tensor([-INF, -INF]))).tolist() == [0, 0]


@pytest.mark.parametrize(("n_head", "slopes"), [
    (8, [2 ** -i for i in range(1, 9)]), (6, [2 ** -2, 2 ** -4, 2 ** -6, 2 ** -8, 2 ** -1, 2 ** -3])])
def test_alibi_slopes_are_those_of_the_paper(n_head: int, slopes: list[float]) -> None:
    mask = -np.arange(5.0)
    got = evaluate(ops.soft_max(tensor(np.zeros((n_head, 1, 5))), tensor(mask), max_bias=8.0))
    close(got[:, 0], softmax(np.outer(slopes, mask)))


def test_sorting_keeps_the_lower_index_first() -> None:
    x = tensor([[2.0, 3, 2, -1, 3], [0, 0, 0, 0, 0]])
    assert evaluate(ops.argsort(x)).tolist() == [[1, 4, 0, 2, 3], [0, 1, 2, 3, 4]]
    assert evaluate(ops.argsort(x, descending=False)).tolist() == [[3, 0, 2, 1, 4], [0, 1, 2, 3, 4]]
    assert evaluate(ops.top_k(x, 3)).tolist() == [[1, 4, 0], [0, 1, 2]]
