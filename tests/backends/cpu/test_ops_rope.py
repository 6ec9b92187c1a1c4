"""Rope: exact sines at any position, one table for all that rotate alike, heads that depend on their token alone."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggraph import ops, quants
from ggraph.backends import ref
from ggraph.dtypes import F16
from ggraph.ops import NEOX, NORMAL
from ggraph.tensor import Tensor
from tests.backends.cpu.plans import Array, Native, evaluate, tensor
from tests.backends.opcase import nmse

RNG = np.random.default_rng(14)
CPU, CPU2, REF = Native(1), Native(2), ref.open()


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def rope(x: Tensor, pos: Tensor, mode: int = NEOX, n_dims: int = 0, **params: Any) -> Tensor:
    return ops.rope(x, pos, None, n_dims=n_dims or x.ne[0], mode=mode, **{"freq_base": 1e4, **params})


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_sines_are_right_to_the_last_place(name: str) -> None:
    x = np.concatenate([RNG.uniform(-1, 1, 2000) * 10.0 ** e for e in range(-3, 10)]).astype(np.float32)
    x = np.concatenate([x, np.float32(np.pi / 2) * np.arange(4000, dtype=np.float32)])      # close to the zeros
    expected = getattr(np, name)(x.astype(np.float64)).astype(np.float32)
    result = evaluate(ops.OPS[name](tensor(x)), CPU)[0, 0, 0]
    assert (np.abs(result - expected) <= np.spacing(np.abs(expected))).all()
    assert np.mean(result != expected) < 1e-3


@pytest.mark.parametrize("mode", [NORMAL, NEOX])
def test_far_positions(mode: int) -> None:
    pos = np.array([0, 1, 100, 32767, 131071, 1_000_000, 2 ** 31 - 1], np.int32)
    node = rope(tensor(normal(7, 2, 128)), tensor(pos), mode)
    assert nmse(evaluate(node, CPU), evaluate(node, REF)) < 1e-13


def test_one_table_serves_all_that_rotate_alike() -> None:
    pos = tensor(np.arange(4, dtype=np.int32))
    q, k = tensor(normal(4, 6, 64)), tensor(normal(4, 2, 64))
    same, other = rope(k, pos), rope(k, pos, freq_base=1e6)
    evaluate(ops.concat(rope(q, pos), same, 1), CPU)
    assert CPU.n_steps == 1 + 2 + 2                         # the table, two rotations, two copies
    node = ops.concat(rope(q, pos), other, 1)
    result = evaluate(node, CPU)
    assert CPU.n_steps == 2 + 2 + 2
    assert nmse(result, evaluate(node, REF)) < 1e-12


def test_a_table_is_made_again_in_every_run() -> None:
    pos = tensor(np.arange(4, dtype=np.int32))
    node = rope(tensor(normal(4, 2, 64)), pos)
    first = evaluate(node, CPU)
    pos.buffer.data.view(np.int32)[:] += 100
    CPU.plans[-1].run(1)
    again = np.array(node.buffer.data.view(np.float32)).reshape(first.shape)
    assert not np.array_equal(first, again) and nmse(again, evaluate(node, REF)) < 1e-12


def test_a_key_of_another_type_is_rotated() -> None:
    """As when keys of a cache are shifted."""
    x = quants.pack(normal(4, 2, 64), F16)
    node = rope(tensor(x, F16), tensor(np.array([-3, 0, 5, -7], np.int32)))
    assert nmse(evaluate(node, CPU), evaluate(node, REF)) < 1e-12
    assert not CPU.fallback


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([NORMAL, NEOX]), st.integers(1, 40), st.integers(0, 9), st.integers(0, 9), st.integers(1, 3))
def test_any_width(mode: int, n_pairs: int, left: int, right: int, n_head: int) -> None:
    x = tensor(normal(5, n_head, left + 2 * n_pairs + right))
    node = rope(x, tensor(RNG.integers(0, 1000, 5).astype(np.int32)), mode, 2 * n_pairs, offset=left)
    result = evaluate(node, CPU)
    assert nmse(result, evaluate(node, REF)) < 1e-12
    assert np.array_equal(result, evaluate(node, CPU2))


@pytest.mark.parametrize("mode", [NORMAL, NEOX])
def test_a_token_is_the_same_alone_and_among_others(mode: int) -> None:
    x, pos = normal(6, 3, 64), np.array([5, 0, 77, 4000, 3, 9], np.int32)
    together = evaluate(rope(tensor(x), tensor(pos), mode), CPU2)
    for i in range(6):
        alone = evaluate(rope(tensor(x[i:i + 1]), tensor(pos[i:i + 1]), mode), CPU)
        assert np.array_equal(alone[0, 0], together[0, i])


def test_no_tokens() -> None:
    node = rope(tensor(normal(0, 3, 64)), tensor(np.zeros(0, np.int32)))
    assert evaluate(node, CPU2).size == 0


@pytest.mark.parametrize("mode", [NORMAL, NEOX])
@pytest.mark.parametrize("norm", [ops.norm, ops.rms_norm])
def test_normed_heads_are_rotated_in_one_step(norm: Any, mode: int) -> None:
    """As of models that norm Q and K, out of one matrix of Q, K and V."""
    qkv = tensor(normal(5, 8, 40))
    heads = ops.view(qkv, (40, 3, 5), qkv.nb[1:3], offset=2 * 40 * 4)
    normed = norm(heads, 1e-6)
    scaled = ops.mul(normed, tensor(normal(40)))
    node = rope(scaled, tensor(RNG.integers(0, 1000, 5).astype(np.int32)), mode, 32, offset=4)
    fused = evaluate(node, CPU)
    assert CPU.n_steps == 2
    assert np.array_equal(fused, evaluate(node, CPU2))
    assert np.array_equal(fused, evaluate(node, CPU, keep={scaled})) and CPU.n_steps == 3
    assert nmse(fused, evaluate(node, REF)) < 1e-12
