"""The table of op cases: every op with the types, shapes, strides and broadcasts that graphs use.

A backend's test runs `check(backend, ref, case)` over all CASES; `python -m tests.backends.optable` prints docs/ops.md.
A case that uses `g.n_tokens` or `g.n_kv` is built at the largest sizes and also run at smaller ones, as plans are.
"""
from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ggraph import ops, quants
from ggraph.backend import Backend
from ggraph.dtypes import BF16, F16, F32, I32, Q4_0, Q4_1, Q4_K, Q6_K, Q8_0, DType
from ggraph.ops import GLU, IMROPE, MROPE, NEOX, NORMAL, UNARY, VISION
from ggraph.tensor import Tensor
from tests.backends.opcase import LARGEST, Build, Case, check, nodes_of, run_case, sizes_of

__all__ = ["CASES", "Case", "check", "markdown", "run_case", "sizes_of"]

NOT_STORED = {"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"}         # no weight has these types
WEIGHTS = [t for t in quants.QUANTS if t.name not in NOT_STORED]
CACHES = [F32, F16, BF16, Q8_0, Q4_0]
V = TypeVar("V")


# --- sources ------------------------------------------------------------------------------------------------------

def permuted(g: Build, type: DType, a: int, b: int, c: int) -> Tensor:
    """[a, b, c], made in memory as [a, c, b]."""
    return ops.permute(g.any(type, a, c, b), (0, 2, 1, 3))


def window(g: Build, n: int, m: int) -> Tensor:
    """[n, m] in the middle of a wider and higher matrix."""
    wide = g.f32(n + 6, m + 2)
    return ops.view(wide, (n, m), (wide.nb[1],), offset=wide.nb[1] + 3 * 4)


def rows(x: Tensor, start: int, n: int) -> Tensor:
    """n rows of a matrix from `start` on."""
    return ops.view(x, (x.ne[0], n), (x.nb[1],), offset=x.nb[1] * start)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The left and the right half of each row of an F32 matrix."""
    ne = (x.ne[0] // 2, x.ne[1])
    return ops.view(x, ne, (x.nb[1],)), ops.view(x, ne, (x.nb[1],), offset=ne[0] * 4)


def cache(g: Build, type: DType, d: int, n_head: int, n_stream: int) -> Tensor:
    """K or V as attention sees it, [d, n_kv, n_head, n_stream], out of a cache of 64 cells for each stream."""
    cells = g.any(type, d * n_head, LARGEST["n_kv"], n_stream)
    row = type.row_bytes(d)
    return ops.permute(ops.view(cells, (d, n_head, g.n_kv, n_stream), (row, row * n_head, cells.nb[2])), (0, 2, 1, 3))


def heads(g: Build, d: int, n_head: int, n_stream: int = 1) -> Tensor:
    """Q as attention sees it, [d, n_tokens, n_head, n_stream]."""
    return ops.permute(g.f32(d, n_head, g.n_tokens, n_stream), (0, 2, 1, 3))


def tokens(g: Build, k: int, d: int = 16, n_head: int = 3, n_seqs: int = 2) -> Iterator[Tensor]:
    """k sources [d, n_head, tokens of all sequences], small enough for states to stay small."""
    return (ops.scale(g.f32(d, n_head, g.n_tokens * n_seqs), 0.3) for _ in range(k))


# Chains of samplers, as words.
CHAINS = {
    "greedy": "", "temp": "temp 0.7;dist", "top_k": "top_k 40;temp 1.5;dist", "top_k 1": "top_k 1;dist", "top_p": "top_p 0.9;dist",
    "top_p 0": "top_p 0;temp 2;dist", "min_p": "min_p 0.1;temp 0.8;dist", "min_p 2": "min_p 2;dist", "cold": "top_k 9;temp 0;dist",
    "default": "top_k 40;top_p 0.95;min_p 0.05;temp 0.8;dist", "all": "top_k 1000;top_p 1;dist",
    "twice": "temp 3;top_p 0.8;temp 0.5;top_k 30;min_p 0.02;dist",
}


def sampled(g: Build, chains: Sequence[str], change: Callable[[Any], Any] = lambda x: x, n_vocab: int = 333) -> Tensor:
    """A token of each row of logits, by these chains in turn."""
    logits = change(2 * g.rng.standard_normal(g.shape((n_vocab, g.n_tokens)))).astype(np.float32)
    steps = np.zeros(g.shape((2, 8, g.n_tokens)), np.float32)
    for row, chain in zip(steps, itertools.cycle(chains)):
        for step, word in zip(row, filter(None, chain.split(";"))):
            name, value = (*word.split(), "0")[:2]
            step[:] = ops.SAMPLE[name], float(value)
    uniform = g.rng.integers(-2**31, 2**31, g.shape((2, g.n_tokens))).astype(np.int32)
    return ops.sample(g.leaf(F32, (n_vocab, g.n_tokens), logits), g.leaf(F32, (2, 8, g.n_tokens), steps),
                      g.leaf(I32, (2, g.n_tokens), uniform))


# --- one op in many forms -----------------------------------------------------------------------------------------

def attention(g: Build, type_k: DType = F16, type_v: DType = F16, d: tuple[int, int] = (64, 64), n_head: int = 4,
              n_head_kv: int = 2, n_stream: int = 1, mask: DType | None = F16, sinks: bool = False,
              **params: Any) -> Tensor:
    q = heads(g, d[0], n_head, n_stream)
    k, v = cache(g, type_k, d[0], n_head_kv, n_stream), cache(g, type_v, d[1], n_head_kv, n_stream)
    seen = g.mask(mask, g.n_kv, g.n_tokens, 1, n_stream) if mask else None
    return ops.flash_attn_ext(q, k, v, seen, g.f32(n_head) if sinks else None, scale=d[0] ** -0.5, **params)


def softmax(g: Build, mask: DType | None = F32, sinks: bool = False, n_stream: int = 1, **params: float) -> Tensor:
    x = g.f32(g.n_kv, g.n_tokens, 6, n_stream)
    seen = g.mask(mask, g.n_kv, g.n_tokens, 1, n_stream) if mask else None
    return ops.soft_max(x, seen, g.f32(6) if sinks else None, **params)


def rope(g: Build, n_dims: int, mode: int, factors: bool = False, fused: bool = False, **params: Any) -> Tensor:
    x = g.f32(64, 5, g.n_tokens)
    if fused:                                           # the heads of Q within a row of Q, K and V
        x = ops.view(x, (64, 3, g.n_tokens), x.nb[1:3], offset=x.nb[1])
    pos = g.ints(5000, g.n_tokens * (4 if mode & MROPE else 1))
    return ops.rope(x, pos, g.positive(n_dims // 2) if factors else None, n_dims=n_dims, mode=mode, freq_base=1e4,
                    **params)


def copy_window(g: Build, type: DType) -> Tensor:
    """Into the middle rows of a matrix, from a transposed one."""
    return ops.cpy(ops.transpose(g.f32(4, 64)), rows(g.any(type, 64, 9), 3, 4))


def set_rows(g: Build, type: DType, n: int = 64) -> Tensor:
    return ops.set_rows(g.any(type, n, 16), g.f32(n, g.n_tokens), g.distinct(16, g.n_tokens))


def join(g: Build, axis: int) -> Tensor:
    a, b = ([k if i == axis else 3 for i in range(4)] for k in (5, 2))
    return ops.concat(g.f32(*a), g.f32(*b), axis)


def experts(g: Build, type: DType, n_used: int = 2, own: bool = False) -> Tensor:
    x = g.f32(256, n_used if own else 1, g.n_tokens)
    return ops.mul_mat_id(g.weight(type, 256, 6, 5), x, g.ints(5, n_used, g.n_tokens))


def chosen_experts(g: Build) -> Tensor:
    """Ids as the first columns of a sorted list."""
    ids = g.ints(5, 5, g.n_tokens)
    chosen = ops.view(ids, (2, g.n_tokens), (ids.nb[1],))
    return ops.mul_mat_id(g.weight(F16, 32, 6, 5), g.f32(32, 1, g.n_tokens), chosen)


def triangular(g: Build) -> Tensor:
    """A well-conditioned system: the matrix is the identity and a little more."""
    a = ops.add(ops.scale(g.f32(12, 12, 2), 0.1), ops.diag(ops.fill(g.f32(12), 1.0)))
    return ops.solve_tri(a, g.f32(5, 12, 2))


def scan(g: Build, d_state: int, dim: int, n_head: int, n_group: int = 1, decays: int = 1,
         n_snapshots: int = 1) -> Tensor:
    n, n_seqs = g.n_tokens, 2
    b, c = (g.f32(d_state, n_group, n, n_seqs) for _ in "bc")
    return ops.ssm_scan(g.f32(d_state, dim, n_head, 4), g.f32(dim, n_head, n, n_seqs), g.f32(n_head, n, n_seqs),
                        ops.neg(g.positive(decays, n_head)), b, c, g.distinct(4, n_seqs), n_snapshots)


def delta(g: Build, d: int, n_head_k: int, n_head: int, decays: int = 1, n_snapshots: int = 1) -> Tensor:
    n, n_seqs = g.n_tokens, 2
    q, k = (ops.l2_norm(g.f32(d, n_head_k, n, n_seqs), 1e-6) for _ in "qk")
    decay, beta = ops.neg(g.positive(decays, n_head, n, n_seqs)), ops.sigmoid(g.f32(1, n_head, n, n_seqs))
    return ops.gated_delta_net(q, k, g.f32(d, n_head, n, n_seqs), decay, beta, g.f32(d, d, n_head, n_seqs), n_snapshots)


def wkv6(g: Build) -> Tensor:
    k, v, r, td = tokens(g, 4)
    return ops.rwkv_wkv6(k, v, r, g.f32(16, 3), ops.sigmoid(td), g.f32(16 * 16 * 3, 2))


def wkv7(g: Build) -> Tensor:
    r, w, k, v, a, b = tokens(g, 6)
    return ops.rwkv_wkv7(r, ops.sigmoid(w), k, v, a, b, g.f32(16 * 16 * 3, 2))


def linear_attention(g: Build, of_heads: bool = False) -> Tensor:
    k, v, q, decay = tokens(g, 4)
    decay = g.f32(1, 3) if of_heads else decay
    return ops.gated_linear_attn(k, v, q, ops.sigmoid(decay), g.f32(16 * 16 * 3, 2), 0.25)


# --- many ops in one form -----------------------------------------------------------------------------------------

def each(op: str, values: Iterable[V], make: Callable[[Build, V], Tensor], label: str = "{}") -> list[Case]:
    """One case per value, labelled with it."""
    def case(value: V) -> Case:
        return Case(op, label.format(value), lambda g: make(g, value))
    return [case(value) for value in values]


def binary(name: str) -> list[Case]:
    make = ops.OPS[name]
    return [Case(name, "same", lambda g: make(g.f32(65, g.n_tokens), g.positive(65, g.n_tokens))),
            Case(name, "row", lambda g: make(g.f32(65, g.n_tokens, 2), g.positive(65))),
            Case(name, "column", lambda g: make(g.f32(65, g.n_tokens), g.positive(1, g.n_tokens))),
            Case(name, "scalar", lambda g: make(g.f32(65, g.n_tokens), g.positive(1))),
            Case(name, "tiled", lambda g: make(g.f32(12, 6, 4), g.positive(4, 3, 2))),
            Case(name, "view", lambda g: make(window(g, 33, 5), ops.transpose(g.positive(5, 33)))),
            Case(name, "F16", lambda g: make(g.f32(65, g.n_tokens), ops.cast(g.positive(65), F16)))]


def unary(name: str) -> list[Case]:
    make = ops.OPS[name]
    return [Case(name, "", lambda g: make(g.positive(131, g.n_tokens) if name in ("log", "sqrt") else
                                          g.f32(131, g.n_tokens))),
            Case(name, "view", lambda g: make(ops.transpose(g.positive(5, 33)))),
            Case(name, "large", lambda g: make(ops.scale(g.positive(131), 20.0)))]


def gated(name: str) -> list[Case]:
    make = ops.OPS[name]
    return [Case(name, "", lambda g: make(g.f32(131, g.n_tokens), g.f32(131, g.n_tokens))),
            Case(name, "halves", lambda g: make(*halves(g.f32(64, g.n_tokens))))]


def clamped(name: str, *args: float) -> Case:
    make = ops.OPS[name]
    return Case(name, "", lambda g: make(*(ops.scale(g.f32(65, g.n_tokens), 4.0) for _ in "gu"), *args))


def by_row(name: str, *args: float) -> list[Case]:
    make = ops.OPS[name]
    return [Case(name, "large", lambda g: make(g.f32(576, g.n_tokens), *args)),
            Case(name, "odd", lambda g: make(g.f32(37, 3, g.n_tokens), *args)),
            Case(name, "view", lambda g: make(window(g, 40, 5), *args)),
            Case(name, "permuted", lambda g: make(permuted(g, F32, 32, 3, 5), *args))]


CASES: list[Case] = [
    Case("view", "", lambda g: ops.cont(window(g, 5, 3))),
    Case("reshape", "", lambda g: ops.cont(ops.reshape(g.f32(12, g.n_tokens), (4, 3, g.n_tokens)))),
    Case("permute", "", lambda g: ops.cont(ops.permute(g.f32(5, 4, g.n_tokens, 2), (2, 0, 3, 1)))),
    Case("transpose", "", lambda g: ops.cont(ops.transpose(g.f32(5, g.n_tokens)))),

    Case("cont", "view", lambda g: ops.cont(window(g, 17, 3))),
    Case("cont", "shape", lambda g: ops.cont(ops.permute(g.f32(8, 3, g.n_tokens), (0, 2, 1, 3)), (8 * 3, g.n_tokens))),
    Case("cont", "I32", lambda g: ops.cont(ops.transpose(g.ints(100, 5, g.n_tokens)))),
    *each("cont", (F16, BF16, Q8_0, Q6_K), lambda g, t: ops.cont(permuted(g, t, 256, 3, 5))),
    *each("cast", quants.PACKABLE, lambda g, t: ops.cast(permuted(g, F32, 64, 3, 5), t), "F32-{}"),
    *each("cast", (F16, BF16, Q8_0, Q4_K), lambda g, t: ops.cast(permuted(g, t, 256, 3, 5), F32), "{}-F32"),
    Case("cast", "F16-Q8_0", lambda g: ops.cast(g.any(F16, 64, g.n_tokens), Q8_0)),
    Case("cast", "I32-F32", lambda g: ops.cast(g.ints(100, 5, g.n_tokens), F32)),
    Case("cast", "F32-I32", lambda g: ops.cast(ops.scale(g.f32(5, g.n_tokens), 10.0), I32)),
    *each("cpy", CACHES, copy_window, "F32-{}"),
    Case("cpy", "shape", lambda g: ops.cpy(g.f32(12, g.n_tokens), g.f32(4, 3, g.n_tokens))),
    Case("cpy", "F16-F32", lambda g: ops.cpy(permuted(g, F16, 8, 3, 5), g.f32(8, 3, 5))),

    *each("get_rows", WEIGHTS, lambda g, t: ops.get_rows(g.weight(t, 256, 9), g.ints(9, g.n_tokens))),
    Case("get_rows", "odd", lambda g: ops.get_rows(g.f32(33, 9), g.ints(9, g.n_tokens))),
    Case("get_rows", "I32", lambda g: ops.get_rows(g.ints(100, 3, 9), g.ints(9, g.n_tokens))),
    Case("get_rows", "batch", lambda g: ops.get_rows(g.f32(1, 9, g.n_tokens), g.ints(9, 4, g.n_tokens))),
    Case("get_rows", "view", lambda g: ops.get_rows(window(g, 16, 9), g.ints(9, g.n_tokens))),
    *each("set_rows", CACHES, set_rows),
    Case("set_rows", "odd", lambda g: set_rows(g, F16, 33)),
    Case("set_rows", "one by one", lambda g: set_rows(g, F16, 1)),
    Case("set_rows", "view", lambda g: ops.set_rows(window(g, 8, 16), ops.transpose(g.f32(g.n_tokens, 8)),
                                                    g.distinct(16, g.n_tokens))),
    Case("set_rows", "batch", lambda g: ops.set_rows(g.f32(8, 6, 4, 3), g.f32(8, 1, 4, 3), g.ints(6, 1, 2, 3))),

    *each("concat", range(4), join, "axis {}"),
    Case("concat", "view", lambda g: ops.concat(window(g, 5, 4), ops.transpose(g.f32(4, 3)), 0)),
    Case("concat", "state", lambda g: ops.concat(g.f32(3, 8, 2), ops.transpose(g.f32(8, g.n_tokens, 2)), 0)),
    Case("repeat", "", lambda g: ops.repeat(g.f32(5, 1, g.n_tokens), (10, 3, g.n_tokens, 2))),
    Case("repeat", "view", lambda g: ops.repeat(window(g, 4, 3), (8, 3, 2))),
    Case("fill", "", lambda g: ops.fill(g.f32(5, g.n_tokens), -np.inf)),
    Case("arange", "", lambda g: ops.arange(1.5, 9.0, 0.5)),
    Case("pad", "right", lambda g: ops.pad(g.f32(5, 3, g.n_tokens), (2, 1))),
    Case("pad", "both", lambda g: ops.pad(window(g, 5, 3), (2, 1, 0, 1), (1, 0, 2))),
    Case("roll", "", lambda g: ops.roll(g.f32(5, 4, g.n_tokens), (2, -1))),
    Case("diag", "", lambda g: ops.diag(g.f32(6, 1, g.n_tokens))),
    Case("tri", "lower", lambda g: ops.tri(g.f32(6, 6, 2), lower=True, diag=False)),
    Case("tri", "lower-diag", lambda g: ops.tri(g.f32(6, 6, 2), lower=True, diag=True)),
    Case("tri", "upper", lambda g: ops.tri(g.f32(6, 6, 2), lower=False, diag=False)),
    Case("tri", "upper-diag", lambda g: ops.tri(g.f32(6, 6, 2), lower=False, diag=True)),

    *each("mul_mat", WEIGHTS, lambda g, t: ops.mul_mat(g.weight(t, 512, 19), g.f32(512, g.n_tokens))),
    *each("mul_mat", WEIGHTS, lambda g, t: ops.mul_mat(g.weight(t, 256, 33), g.f32(256)), "{}-one"),
    Case("mul_mat", "batch", lambda g: ops.mul_mat(g.f32(64, 7, 2), g.f32(64, g.n_tokens, 6, 2))),
    Case("mul_mat", "kq", lambda g: ops.mul_mat(cache(g, F16, 64, 2, 2), heads(g, 64, 4, 2))),
    Case("mul_mat", "kq-Q8_0", lambda g: ops.mul_mat(cache(g, Q8_0, 64, 2, 1), heads(g, 64, 4))),
    Case("mul_mat", "kqv", lambda g: ops.mul_mat(ops.permute(cache(g, F16, 64, 2, 1), (1, 0, 2, 3)),
                                                 g.f32(g.n_kv, g.n_tokens, 4))),
    Case("mul_mat", "odd", lambda g: ops.mul_mat(g.weight(F32, 33, 5), g.f32(33, g.n_tokens))),
    Case("mul_mat", "rows", lambda g: ops.mul_mat(rows(g.weight(Q4_1, 64, 12), 4, 5), g.f32(64, g.n_tokens))),
    Case("mul_mat", "view", lambda g: ops.mul_mat(g.weight(Q8_0, 32, 5), window(g, 32, 3))),
    Case("mul_mat", "heads", lambda g: ops.mul_mat(g.weight(Q8_0, 64, 16, 3), g.f32(64, g.n_tokens, 3))),
    *each("mul_mat_id", WEIGHTS, experts),
    Case("mul_mat_id", "each its own", lambda g: experts(g, Q8_0, 3, own=True)),
    Case("mul_mat_id", "view", chosen_experts),
    Case("out_prod", "", lambda g: ops.out_prod(g.f32(5, 8), g.f32(7, 8))),
    Case("out_prod", "batch", lambda g: ops.out_prod(g.f32(5, 3, 2), g.f32(7, 3, 4, 2))),
    Case("solve_tri", "", triangular),

    *(case for name in ("add", "sub", "mul", "div") for case in binary(name)),
    Case("add_id", "", lambda g: ops.add_id(g.f32(32, 3, g.n_tokens), g.f32(32, 5), g.ints(5, 3, g.n_tokens))),
    Case("scale", "", lambda g: ops.scale(g.f32(65, g.n_tokens), 0.7)),
    Case("scale", "bias", lambda g: ops.scale(window(g, 33, 5), -2.0, 0.5)),
    Case("clamp", "", lambda g: ops.clamp(g.f32(65, g.n_tokens), -0.5, 0.8)),
    *(case for name in UNARY for case in unary(name)),
    *(case for name in GLU for case in gated(name)),
    clamped("swiglu_oai", 1.702, 7.0),
    clamped("swiglu_clamp", 7.0),

    *(case for name in ("norm", "rms_norm", "l2_norm") for case in by_row(name, 1e-5)),
    *(case for name in ("sum_rows", "mean", "cumsum") for case in by_row(name)),
    Case("group_norm", "", lambda g: ops.group_norm(g.f32(7, 3, 8, 2), 4, 1e-6)),
    Case("group_norm", "uneven", lambda g: ops.group_norm(g.f32(7, g.n_tokens, 8), 3, 1e-6)),
    Case("soft_max", "plain", lambda g: softmax(g, None)),
    Case("soft_max", "F32", lambda g: softmax(g, F32, scale=0.3)),
    Case("soft_max", "F16-streams", lambda g: softmax(g, F16, n_stream=3)),
    Case("soft_max", "sinks", lambda g: softmax(g, sinks=True)),
    Case("soft_max", "alibi", lambda g: softmax(g, scale=0.5, max_bias=8.0)),
    Case("soft_max", "odd", lambda g: ops.soft_max(g.f32(13, g.n_tokens))),
    Case("pool_1d", "", lambda g: ops.pool_1d(g.f32(24, g.n_tokens, 2), 8)),
    Case("argsort", "descending", lambda g: ops.argsort(g.f32(37, g.n_tokens))),
    Case("argsort", "ascending", lambda g: ops.argsort(g.f32(37, g.n_tokens), descending=False)),
    Case("argsort", "ties", lambda g: ops.argsort(ops.cast(g.ints(3, 37, g.n_tokens), F32))),
    Case("top_k", "", lambda g: ops.top_k(g.f32(37, g.n_tokens), 5)),
    Case("top_k", "ties", lambda g: ops.top_k(ops.cast(g.ints(3, 37, g.n_tokens), F32), 8)),

    Case("hadamard", "", lambda g: ops.hadamard(g.f32(64, 3, g.n_tokens), 64)),
    Case("hadamard", "view", lambda g: ops.hadamard(window(g, 192, 5), 64)),
    Case("rope", "normal", lambda g: rope(g, 64, NORMAL)),
    Case("rope", "neox", lambda g: rope(g, 64, NEOX)),
    Case("rope", "partial", lambda g: rope(g, 16, NORMAL)),
    Case("rope", "neox-partial", lambda g: rope(g, 32, NEOX)),
    Case("rope", "offset", lambda g: rope(g, 16, NORMAL, offset=48)),
    Case("rope", "neox-offset", lambda g: rope(g, 32, NEOX, offset=32)),
    Case("rope", "fused", lambda g: rope(g, 64, NEOX, fused=True)),
    Case("rope", "factors", lambda g: rope(g, 64, NORMAL, factors=True)),
    Case("rope", "scaled", lambda g: rope(g, 64, NEOX, freq_scale=0.25, attn_factor=1.1)),
    Case("rope", "yarn", lambda g: rope(g, 64, NORMAL, freq_scale=0.25, ext_factor=1.0, n_ctx_orig=2048)),
    Case("rope", "yarn-neox", lambda g: rope(g, 64, NEOX, freq_scale=0.1, ext_factor=1.0, n_ctx_orig=4096, factors=True,
                                             beta_fast=16.0, beta_slow=2.0, attn_factor=0.8)),
    Case("rope", "mrope", lambda g: rope(g, 64, MROPE, sections=(8, 12, 12, 0))),
    Case("rope", "mrope-partial", lambda g: rope(g, 32, MROPE, sections=(4, 6, 6, 0))),
    Case("rope", "imrope", lambda g: rope(g, 64, IMROPE, sections=(11, 11, 10, 0))),
    Case("rope", "imrope-partial", lambda g: rope(g, 48, IMROPE, sections=(8, 6, 6, 4), freq_scale=0.5)),
    Case("rope", "vision", lambda g: rope(g, 32, VISION, sections=(16, 16, 0, 0))),

    *each("flash_attn_ext", CACHES, lambda g, t: attention(g, t, t)),
    Case("flash_attn_ext", "Q8_0-Q4_0", lambda g: attention(g, Q8_0, Q4_0)),
    Case("flash_attn_ext", "no mask", lambda g: attention(g, mask=None)),
    Case("flash_attn_ext", "mask F32", lambda g: attention(g, mask=F32)),
    Case("flash_attn_ext", "streams", lambda g: attention(g, n_stream=3)),
    Case("flash_attn_ext", "one KV head", lambda g: attention(g, n_head=8, n_head_kv=1)),
    Case("flash_attn_ext", "one head each", lambda g: attention(g, n_head=3, n_head_kv=3)),
    Case("flash_attn_ext", "wide", lambda g: attention(g, d=(256, 256), n_head_kv=1)),
    Case("flash_attn_ext", "mla", lambda g: attention(g, d=(192, 128), n_head_kv=1)),
    Case("flash_attn_ext", "odd head", lambda g: attention(g, d=(40, 24))),
    Case("flash_attn_ext", "sinks", lambda g: attention(g, sinks=True)),
    Case("flash_attn_ext", "softcap", lambda g: attention(g, logit_softcap=2.0)),
    Case("flash_attn_ext", "alibi", lambda g: attention(g, F32, F32, n_head=6, n_head_kv=6, max_bias=8.0)),

    *(Case("sample", label, partial(sampled, chains=[chain])) for label, chain in CHAINS.items()),
    Case("sample", "each its own", lambda g: sampled(g, list(CHAINS.values()))),
    Case("sample", "equal logits", lambda g: sampled(g, ["top_k 5;dist"], np.round)),
    Case("sample", "nothing to choose", lambda g: sampled(g, ["top_k 5;dist"], lambda x: np.where(x < 9, -np.inf, x))),
    Case("sample", "NaN", lambda g: sampled(g, [""], lambda x: np.where(x > 2, np.nan, x))),

    Case("ssm_conv", "", lambda g: ops.ssm_conv(g.f32(g.n_tokens + 3, 20, 2), g.f32(4, 20))),
    Case("ssm_scan", "mamba", lambda g: scan(g, 16, 1, 24, decays=16)),
    Case("ssm_scan", "mamba2", lambda g: scan(g, 32, 8, 6, n_group=2)),
    Case("ssm_scan", "snapshots", lambda g: scan(g, 16, 8, 4, n_snapshots=3)),
    Case("gated_delta_net", "", lambda g: delta(g, 32, 2, 2)),
    Case("gated_delta_net", "more value heads", lambda g: delta(g, 32, 2, 4)),
    Case("gated_delta_net", "per channel", lambda g: delta(g, 16, 2, 2, decays=16)),
    Case("gated_delta_net", "snapshots", lambda g: delta(g, 16, 2, 2, n_snapshots=4)),
    Case("rwkv_wkv6", "", wkv6),
    Case("rwkv_wkv7", "", wkv7),
    Case("gated_linear_attn", "", linear_attention),
    Case("gated_linear_attn", "a decay of each head", lambda g: linear_attention(g, of_heads=True)),
]


# --- docs/ops.md --------------------------------------------------------------------------------------------------

def markdown(backend: Backend) -> str:
    """docs/ops.md: one row per op with its call, its meaning, and the shapes of its first case."""
    first = {case.op: case for case in reversed(CASES)}
    table = []
    for name, make in ops.OPS.items():
        node = next(n for n in nodes_of(first[name].build(backend)[1]) if n.op == name)
        doc = " ".join((make.__doc__ or "").split()).replace("|", "\\|")
        shapes = ", ".join(_shape(s) for s in node.src if s is not None)
        table.append(f"| `{name}` | `{_call(make)}` | {doc} | {shapes} -> {_shape(node)} |")
    return "\n".join([
        "# Ops", "", "Made from `ggraph/ops/` and the case table by `python -m tests.backends.optable`.",
        "Shapes are in ggml's order, the contiguous axis first. What an op computes is defined in `backends/ref`.", "",
        "| op | call | meaning | for example |", "|---|---|---|---|", *table, ""])


def _call(make: Callable[..., Tensor]) -> str:
    parameters = [f"{p.name}={p.default}" if p.default is not p.empty else p.name
                  for p in inspect.signature(make).parameters.values()]
    return f"{make.__name__}({', '.join(parameters)})"


def _shape(t: Tensor) -> str:
    ne = [int(n) for n in t.ne]
    while len(ne) > 1 and ne[-1] == 1:
        ne.pop()
    return f"{t.type} {ne}"


if __name__ == "__main__":
    from ggraph.backend import open_backend
    sys.stdout.write(markdown(open_backend("ref")))
