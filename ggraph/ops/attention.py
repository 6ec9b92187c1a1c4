"""Attention: rotation, the transform before quantized K and V, and the product in one op."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ggraph.tensor import F32, Tensor

from .table import check, op

NORMAL, NEOX, MROPE, VISION, IMROPE = 0, 2, 8, 24, 40       # ggml's rope modes


@op
def rope(x: Tensor, pos: Tensor, factors: Tensor | None, *, n_dims: int, mode: int, freq_base: float,
         freq_scale: float = 1.0, ext_factor: float = 0.0, attn_factor: float = 1.0, beta_fast: float = 32.0,
         beta_slow: float = 1.0, n_ctx_orig: int = 0, sections: Sequence[int] = (0, 0, 0, 0),
         offset: int = 0) -> Tensor:
    """Rotate n_dims dimensions, from `offset` on, of each head of x [head, n_head, n_tokens] by its position.

    pos I32 [n_tokens], or [4 n_tokens] (axis after axis) for the multi-axis modes; factors F32 [n_dims/2] divide the
    angles. YaRN's parameters as in ggml_rope_ext.
    """
    check(n_dims > 0 and n_dims % 2 == 0 and offset + n_dims <= x.ne[0], f"rope of {n_dims} dimensions from {offset} on", x)
    check(mode != VISION or (n_dims * 2 == x.ne[0] and not offset), "rope: VISION turns the whole head", x)
    check(pos.ne[0] == x.ne[2] * (4 if mode & MROPE else 1), "rope: wrong number of positions", x, pos)
    check(not mode & MROPE or (len(sections) == 4 and min(sections) >= 0 < sum(sections)), f"rope: sections {sections}", x)
    check(factors is None or factors.ne[0] * 2 >= n_dims, "rope: too few frequency factors", x)
    params: dict[str, Any] = dict(n_dims=n_dims, mode=mode, freq_base=freq_base, freq_scale=freq_scale,
                                  ext_factor=ext_factor, attn_factor=attn_factor, beta_fast=beta_fast,
                                  beta_slow=beta_slow, n_ctx_orig=n_ctx_orig, sections=tuple(sections), offset=offset)
    return Tensor("rope", F32, x.ne, (x, pos, factors), params)


@op
def hadamard(x: Tensor, n: int) -> Tensor:
    """Each run of n (a power of two) elements of axis 0 times the orthonormal Walsh-Hadamard matrix; its own inverse.

    It spreads outliers evenly before K and V are quantized.
    """
    check(n & (n - 1) == 0 and x.ne[0] % n == 0, f"hadamard: rows are not a multiple of {n}", x)
    return Tensor("hadamard", F32, x.ne, (x,), {"n": n})


@op
def flash_attn_ext(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None = None,
                   cells: Tensor | None = None, spans: Tensor | None = None, *, scale: float,
                   max_bias: float = 0.0, logit_softcap: float = 0.0) -> Tensor:
    """softmax(scale q k + mask) v in one op: F32 [dv, n_head, n_tokens, n_stream].

    q F32 [dk, n_tokens, n_head, n_stream]; k [dk, n_kv, n_head_kv, n_stream], v [dv, ...] of any cache type;
    mask F32/F16 [n_kv, n_tokens, 1, n_stream] is the definition of who sees what. `cells` I32 [n_cells] and `spans`
    I32 [n_tokens * n_stream, 4] say the same as lists in position order (`memory.kv.ordered`), counted in rows of the
    cache that k and v are views of: a kernel may use them instead, so that other sequences cost nothing and the order
    of summation depends on the sequence alone.
    """
    check(q.ne[0] == k.ne[0] and k.ne[1] == v.ne[1] and q.ne[2] % k.ne[2] == q.ne[2] % v.ne[2] == 0
          and q.ne[3] == k.ne[3] == v.ne[3], "flash_attn_ext: shapes differ", q, k, v)
    params = {"scale": scale, "max_bias": max_bias, "logit_softcap": logit_softcap}
    return Tensor("flash_attn_ext", F32, (v.ne[0], q.ne[2], q.ne[1], q.ne[3]), (q, k, v, mask, sinks, cells, spans),
                  params)
