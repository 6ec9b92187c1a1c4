"""Recurrent layers: state rows read and written, causal convolution, the gated delta rule.

In: hidden states of n_seqs sequences of n_seq_tokens each. Out: the same. A state is read from the row `rs_src` and written
to the spare row `rs_dst`; both are graph inputs.
"""
from __future__ import annotations

from .. import inputs, ops
from ..tensor import Tensor
from ..weights import Param
from .core import Core, split


class Recurrent(Core):
    def by_seq(self, x: Tensor, *head: int) -> Tensor:
        """[n, n_tokens] -> [*head, n_seq_tokens, n_seqs], head being (n,) if not given."""
        return ops.reshape(x, (*(head or x.ne[:1]), self.dims.n_seq_tokens, self.dims.n_seqs))

    def all_tokens(self, x: Tensor, n: int) -> Tensor:
        """The way back: [n, n_tokens]."""
        return ops.reshape(x, (n, self.n_tokens))

    def state_rows(self) -> tuple[Tensor, Tensor]:
        """(rows read, rows written), I32 [n_seqs]"""
        src, dst = self.input(inputs.StateRows, self.memory, self.dims.n_seqs)
        return src, dst

    def load_state(self, cache: Tensor) -> Tensor:
        """The sequences' rows of a state, [n, n_seqs]."""
        return ops.get_rows(cache, self.state_rows()[0])

    def store_state(self, cache: Tensor, x: Tensor) -> None:
        """Leave x [.., n_seqs], n elements of each sequence, in the sequences' new rows."""
        n = cache.ne[0]
        rows = ops.reshape(x, (n, self.dims.n_seqs)) if x.contiguous else ops.cont(x, (n, self.dims.n_seqs))
        self.g.expand(ops.set_rows(cache, rows, self.state_rows()[1]))

    def conv(self, x: Tensor, p: Param, il: int) -> Tensor:
        """Causal convolution of x [channels, n_seq_tokens, n_seqs], going on from the last d_conv - 1 inputs of before, which
        are kept in the layer's row of `cache_r`."""
        rs = self.memory.rs
        assert rs is not None
        kernel, channels = p.weight, x.ne[0]
        state = self.cb(self.load_state(rs.r[il]), "conv_states", il)
        state = ops.reshape(state, (kernel.ne[0] - 1, channels, self.dims.n_seqs))
        padded = self.cb(ops.concat(state, ops.transpose(x), 0), "conv_input", il)
        last = ops.view(padded, state.ne[:3], padded.nb[1:3], x.ne[1] * padded.nb[0])
        self.store_state(rs.r[il], self.cb(last, "conv_state_last", il))
        y = ops.ssm_conv(padded, kernel)
        if p.bias is not None:
            y = ops.add(y, p.bias)
        return self.cb(y, "conv_output_raw", il)

    def delta_net(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, il: int) -> Tensor:
        """The gated delta rule over q, k [d, n_head_k, n_seq_tokens, n_seqs], v [d, n_head, ..]; gate, beta [1, n_head, ..]
        (or a gate per channel [d, n_head, ..]): the outputs, shaped as v. The state stays in the layer's row."""
        rs = self.memory.rs
        assert rs is not None
        d, n_head = v.ne[:2]
        state = ops.reshape(self.load_state(rs.s[il]), (d, d, n_head, self.dims.n_seqs))
        state = self.cb(state, "state_predelta", il)
        both = ops.gated_delta_net(q, k, v, gate, beta, state)
        n = both.nb[1] * self.n_tokens
        after = ops.view(both, (d * d * n_head, self.dims.n_seqs), (d * d * n_head * both.nb[0],), n)
        self.store_state(rs.s[il], self.cb(after, "new_state", il))
        out = ops.view(both, v.ne, (both.nb[0] * d, both.nb[1], both.nb[1] * v.ne[2]))
        return self.cb(out, "attn_output", il)

    def split_heads(self, x: Tensor, *shapes: tuple[int, int]) -> list[Tensor]:
        """[n, n_seq_tokens, n_seqs] -> views [head, n_head, n_seq_tokens, n_seqs] of consecutive pieces."""
        pieces = split(x, [n * heads for n, heads in shapes])
        return [ops.view(p, (n, heads, *p.ne[1:3]), (n * p.nb[0], *p.nb[1:3])) for p, (n, heads) in zip(pieces, shapes)]
