"""Recurrences: token by token, each sequence from its own state.

A result holds the outputs of all tokens and, behind them, the new states; views take it apart. Sources hold the
sequences one after the other, all of the same number of tokens.
"""
from __future__ import annotations

from typing import Any

from ggraph.tensor import F32, I32, Tensor

from .table import check, op, repeats


@op
def ssm_conv(x: Tensor, kernel: Tensor) -> Tensor:
    """Causal convolution of each channel: x [d_conv - 1 + n_tokens, d_inner, n_seqs], kernel [d_conv, d_inner] ->
    [d_inner, n_tokens, n_seqs]."""
    check(x.ne[1] == kernel.ne[1], "ssm_conv: channels differ", x, kernel)
    return Tensor("ssm_conv", F32, (kernel.ne[1], x.ne[0] - kernel.ne[0] + 1, x.ne[2]), (x, kernel))


@op
def ssm_scan(s: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, ids: Tensor,
             n_snapshots: int = 1) -> Tensor:
    """The selective scan of Mamba (A [d_state, n_head]) and Mamba-2 (A [1, n_head]).

    With dt' = softplus(dt): s = s exp(dt' A) + dt' x B and y = s C for each token, where s [d_state, dim, n_head, rows]
    is row ids[i] for sequence i; x [dim, n_head, n_tokens, n_seqs], dt [n_head, n_tokens, n_seqs], B and C [d_state,
    n_group, n_tokens, n_seqs], each group serving neighbouring heads. The result is flat: y as x is, then
    `n_snapshots` times [d_state, dim, n_head, n_seqs]: the last state, that of one token before, ...; where there are
    too few tokens, the state that came in.
    """
    d_state, dim, n_head, n_seqs = s.ne[0], x.ne[0], x.ne[1], x.ne[3]
    check(s.ne[1:3] == x.ne[:2] and ids.ne[0] == n_seqs and ids.type is I32, "ssm_scan: states do not fit", s, x, ids)
    check(dt.ne[:3] == (n_head, *x.ne[2:]), "ssm_scan: dt does not fit", dt, x)
    check(A.ne[0] in (1, d_state) and A.ne[1] == n_head, "ssm_scan: A does not fit", A, x)
    check(B.ne == C.ne and B.ne[0] == d_state and n_head % B.ne[1] == 0 and B.ne[2:] == x.ne[2:],
          "ssm_scan: B or C does not fit", B, C, x)
    n = x.numel + n_snapshots * (d_state * dim * n_head * n_seqs)
    return Tensor("ssm_scan", F32, (n,), (s, x, dt, A, B, C, ids), {"n_snapshots": n_snapshots})


@op
def gated_delta_net(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor,
                    n_snapshots: int = 1) -> Tensor:
    """The gated delta rule, with one decay per head (g [1, n_head, ..]) or per key channel (g [d, n_head, ..]).

    S = exp(g) S, then S += k outer beta (v - S k), then the output is S q / sqrt(d), for each token. v [d, n_head,
    n_tokens, n_seqs]; q and k have n_head_k heads, head h of v uses h % n_head_k; beta [1, n_head, ..]; state [d (of
    k), d (of v), n_head, n_seqs]. The result [d n_head, ..] holds as rows the outputs [d, n_head, n_tokens, n_seqs],
    then `n_snapshots` states, as in ssm_scan.
    """
    d, n_head, n_tokens, n_seqs = v.ne
    check(q.ne == k.ne and k.ne[0] == d and n_head % k.ne[1] == 0 and k.ne[2:] == v.ne[2:],
          "gated_delta_net: q or k does not fit", q, k, v)
    check(g.ne[0] in (1, d) and g.ne[1:] == v.ne[1:] and beta.ne == (1, *v.ne[1:]),
          "gated_delta_net: g or beta does not fit", g, beta, v)
    check(state.ne == (d, d, n_head, n_seqs), "gated_delta_net: state does not fit", state, v)
    return Tensor("gated_delta_net", F32, (d * n_head, n_tokens * n_seqs + n_snapshots * d * n_seqs),
                  (q, k, v, g, beta, state), {"n_snapshots": n_snapshots})


def _linear(name: str, src: tuple[Tensor, ...], per_token: tuple[Tensor, ...], **params: Any) -> Tensor:
    """`per_token` all [d, n_head, n_tokens], the last source a state [d d n_head, n_seqs] -> [d n_head, n_tokens + d
    n_seqs]."""
    d, n_head, n_tokens = src[0].ne[:3]
    check(all(x.ne == (d, n_head, n_tokens, 1) for x in per_token), f"{name}: shapes differ", *per_token)
    check(src[-1].ne[0] == d * d * n_head, f"{name}: state does not fit", src[-1], src[0])
    return Tensor(name, F32, (d * n_head, n_tokens + d * src[-1].ne[1]), src, params)


@op
def rwkv_wkv6(k: Tensor, v: Tensor, r: Tensor, tf: Tensor, td: Tensor, state: Tensor) -> Tensor:
    """RWKV-6: y = r (S + tf k outer v), then S = td S + k outer v; tf [d, n_head] is the weight of the token itself.

    All others [d, n_head, n_tokens of all sequences]; state [d d n_head, n_seqs], S [v, k] -> rows of y, then of S.
    """
    check(tf.ne[0] == k.ne[0] and tf.ne[1] == k.ne[1], "rwkv_wkv6: tf does not fit", tf, k)
    return _linear("rwkv_wkv6", (k, v, r, tf, td, state), (k, v, r, td))


@op
def rwkv_wkv7(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor) -> Tensor:
    """RWKV-7: S = S w + v outer k + (S a) outer b, then y = S r; shapes as rwkv_wkv6, but S [k, v]."""
    return _linear("rwkv_wkv7", (r, w, k, v, a, b, state), (r, w, k, v, a, b))


@op
def gated_linear_attn(k: Tensor, v: Tensor, q: Tensor, g: Tensor, state: Tensor, scale: float) -> Tensor:
    """S = g S + k outer v, then y = scale q S; shapes as rwkv_wkv6, but g may be one for each head [1, n_head, ..] and the same
    for all tokens [.., 1]."""
    check(repeats(k, g) and g.ne[1] == k.ne[1], "gated_linear_attn: g does not fit", g, k)
    return _linear("gated_linear_attn", (k, v, q, g, state), (k, v, q), scale=scale)
