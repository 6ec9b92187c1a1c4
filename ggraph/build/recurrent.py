"""Recurrent layers: state rows read and written, causal convolution, the gated delta rule, the selective scan, linear attention.

In: hidden states of n_seqs sequences of n_seq_tokens each. Out: the same. A state is read from the row `rs_src` and written
to the spare row `rs_dst`; both are graph inputs.
"""
from __future__ import annotations

from collections.abc import Callable

from .. import inputs, ops
from ..errors import Error
from ..memory.cache import StateCache
from ..tensor import Tensor
from ..weights import Param
from .core import Core, split


class Recurrent(Core):
    @property
    def rs(self) -> StateCache:
        """The state rows of all recurrent layers."""
        assert self.memory.rs is not None
        return self.memory.rs

    def by_seq(self, x: Tensor, *head: int) -> Tensor:
        """[n, n_tokens] -> [*head, n_seq_tokens, n_seqs], head being (n,) if not given; then x may be a strided view."""
        n, n_seqs = self.dims.n_seq_tokens, self.dims.n_seqs
        if x.contiguous:
            return ops.reshape(x, (*(head or x.ne[:1]), n, n_seqs))
        assert not head
        return ops.view(x, (x.ne[0], n, n_seqs), (x.nb[1], x.nb[1] * n))

    def all_tokens(self, x: Tensor, n: int) -> Tensor:
        """The way back: [n, n_tokens]."""
        return ops.reshape(x, (n, self.n_tokens))

    def split_heads(self, x: Tensor, *shapes: tuple[int, int]) -> list[Tensor]:
        """[n, n_seq_tokens, n_seqs] -> views [head, n_head, n_seq_tokens, n_seqs] of consecutive pieces."""
        pieces = split(x, [n * heads for n, heads in shapes])
        return [ops.view(p, (n, heads, *p.ne[1:3]), (n * p.nb[0], *p.nb[1:3])) for p, (n, heads) in zip(pieces, shapes)]

    def l2_norm(self, x: Tensor, name: str, il: int) -> Tensor:
        """x / sqrt(sum of x^2 + eps) over axis 0, as delta nets norm Q and K."""
        n = x.ne[0]
        return self.cb(ops.scale(ops.rms_norm(x, self.hp.f_norm_rms_eps / n), n ** -0.5), name, il)

    def repeat_heads(self, x: Tensor, n_head: int) -> Tensor:
        """Contiguous x [d, n, n_seq_tokens, n_seqs] -> [d, n_head, ..], each head as often as needed, side by side."""
        d, n, *rest = x.ne
        if n == n_head:
            return x
        one = ops.reshape(x, (d, 1, n, rest[0] * rest[1]))
        return ops.reshape(ops.repeat(one, (d, n_head // n, *one.ne[2:])), (d, n_head, *rest))

    # --- rows

    @property
    def n_snapshots(self) -> int:
        """How many states are kept: that after the last token, after the one before it, .."""
        return self.rs.store.n_snapshots

    def state_rows(self) -> tuple[Tensor, Tensor]:
        """Rows read I32 [n_seqs], rows written [n_seqs, n_snapshots]"""
        src, dst = self.input(inputs.StateRows, self.memory, self.dims.n_seqs)
        return src, dst

    def load_state(self, cache: Tensor) -> Tensor:
        """The sequences' rows of a state, [n, n_seqs]."""
        return ops.get_rows(cache, self.state_rows()[0])

    def store_state(self, cache: Tensor, x: Tensor, snapshot: int = 0) -> None:
        """Leave x [.., n_seqs], n elements of each sequence, in the sequences' new rows."""
        n, dst = cache.ne[0], self.state_rows()[1]
        if self.n_snapshots > 1:
            dst = ops.view(dst, dst.ne[:1], (), snapshot * dst.nb[1])
        rows = ops.reshape(x, (n, self.dims.n_seqs)) if x.contiguous else ops.cont(x, (n, self.dims.n_seqs))
        self.g.expand(ops.set_rows(cache, rows, dst))

    def _store_behind(self, cache: Tensor, both: Tensor, offset: int, il: int) -> None:
        """Store the new states that an op's result holds `offset` bytes from its start, snapshot by snapshot."""
        n, n_seqs = cache.ne[0], self.dims.n_seqs
        for i in range(self.n_snapshots):
            after = ops.view(both, (n, n_seqs), (n * both.nb[0],), offset + i * n_seqs * n * both.nb[0])
            self.store_state(cache, self.cb(after, "new_state", il), i)

    # --- convolution

    def history(self, x: Tensor, cache: Tensor, n: int, il: int) -> Tensor:
        """x [channels, n_seq_tokens, n_seqs] behind the n inputs before it, which `cache` keeps: [n + n_seq_tokens, channels,
        n_seqs]."""
        back = self.n_snapshots - 1
        self.g.expand(x)                                                  # so that all that touches the row stands together
        state = ops.reshape(self.cb(self.load_state(cache), "conv_states", il), (n, x.ne[0], self.dims.n_seqs))
        before = ops.pad(state, (), (back,)) if back else state           # room for windows that begin before the first token
        padded = self.cb(ops.concat(before, ops.transpose(x), 0), "conv_input", il)
        for i in range(self.n_snapshots):
            last = ops.view(padded, state.ne[:3], padded.nb[1:3], (x.ne[1] + (back - i)) * padded.nb[0])
            self.store_state(cache, self.cb(last, "conv_state_last", il), i)
        return ops.view(padded, (n + x.ne[1], *padded.ne[1:3]), padded.nb[1:3], back * padded.nb[0]) if back else padded

    @staticmethod
    def _part(cache: Tensor, n: int, part: int) -> Tensor:
        """Part number `part` of rows that have several of n elements."""
        return cache if n == cache.ne[0] else ops.view(cache, (n, cache.ne[1]), (cache.nb[1],), part * n * cache.nb[0])

    def shifted(self, x: Tensor, il: int, part: int) -> Tensor:
        """x [n, n_tokens] of the token before each, the first one's from part `part` of the layer's row, where the last stays."""
        cache, n, n_seqs = self._part(self.rs.r[il], x.ne[0], part), x.ne[0], self.dims.n_seqs
        both = ops.concat(ops.reshape(self.load_state(cache), (n, 1, n_seqs)), self.by_seq(x), 1)
        self.no_snapshots()
        self.store_state(cache, ops.view(both, (n, n_seqs), (both.nb[2],), self.dims.n_seq_tokens * both.nb[1]))
        return ops.cont(ops.view(both, (n, self.dims.n_seq_tokens, n_seqs), both.nb[1:3]), (n, self.n_tokens))

    def conv(self, x: Tensor, p: Param, il: int, part: int = 0) -> Tensor:
        """Causal convolution of x [channels, n_seq_tokens, n_seqs], going on from the last d_conv - 1 inputs of before, which
        are kept in the layer's row of `cache_r`: in its part number `part` where several convolutions share the row."""
        kernel, cache, channels = p.weight, self.rs.r[il], x.ne[0]
        n = kernel.ne[0] - 1
        cache = self._part(cache, n * channels, part)
        kernel = kernel if kernel.ne[1] == channels else ops.reshape(kernel, (n + 1, channels))
        y = ops.ssm_conv(self.history(x, cache, n, il), kernel)
        if p.bias is not None:
            y = ops.add(y, p.bias)
        return self.cb(y, "conv_output_raw", il)

    def ngram_embd(self, p: Param) -> Tensor:
        """What the table `p` holds for each token and those before it, all heads side by side: [n, n_tokens]"""
        ngrams = self.hp.ngrams
        assert ngrams is not None
        rows, = self.input(inputs.NgramRows, self.memory, ngrams, self.n_tokens)
        return self.cb(self.all_tokens(ops.get_rows(p.weight, rows), p.weight.ne[0] * len(ngrams.rows)), "ple_embd")

    # --- recurrences

    def delta_net(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, il: int) -> Tensor:
        """The gated delta rule over q, k [d, n_head_k, n_seq_tokens, n_seqs], v [d, n_head, ..]; gate, beta [1, n_head, ..]
        (or a gate per channel [d, n_head, ..]): the outputs, shaped as v. The state stays in the layer's row."""
        cache, (d, n_head) = self.rs.s[il], v.ne[:2]
        state = ops.reshape(self.load_state(cache), (d, d, n_head, self.dims.n_seqs))
        both = ops.gated_delta_net(q, k, v, gate, beta, self.cb(state, "state_predelta", il), self.n_snapshots)
        self._store_behind(cache, both, v.numel * both.nb[0], il)
        out = ops.view(both, v.ne, (both.nb[0] * d, both.nb[1], both.nb[1] * v.ne[2]))
        return self.cb(out, "attn_output", il)

    def scan(self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, il: int) -> Tensor:
        """The selective scan over x [dim, n_head, n_seq_tokens, n_seqs] with dt [n_head, ..], a [d_state or 1, n_head], b and c
        [d_state, n_group, ..]: the outputs, shaped as x. The state stays in the layer's row."""
        cache = self.rs.s[il]
        states = ops.reshape(cache, (b.ne[0], *x.ne[:2], cache.ne[1]))
        both = ops.ssm_scan(states, x, dt, a, b, c, self.state_rows()[0], self.n_snapshots)
        self._store_behind(cache, both, x.numel * both.nb[0], il)
        return self.cb(ops.view(both, x.ne), "ssm_scan", il)

    def linear_attention(self, q: Tensor, k: Tensor, v: Tensor, slope_scale: float, il: int) -> Tensor:
        """Attention without softmax over q, k, v [d, n_head, n_tokens]: what a token sees of those before fades by a factor of
        each head, exp(-slope_scale slope). The outputs, shaped as v; the state stays in the layer's row."""
        slopes, = self.input(inputs.HeadSlopes, v.ne[1])
        decay = self.cb(ops.exp(ops.scale(slopes, -slope_scale)), "decay", il)
        return self.cb(self.recurrence(lambda state: ops.gated_linear_attn(k, v, q, decay, state, 1.0), v, il), "qkv", il)

    def recurrence(self, make: Callable[[Tensor], Tensor], v: Tensor, il: int) -> Tensor:
        """The outputs, shaped as v [d, n_head, n_tokens], of the op that `make` makes of the state [d d n_head, n_seqs]; it stays
        in the layer's row."""
        self.no_snapshots()
        cache = self.rs.s[il]
        both = make(self.cb(self.load_state(cache), "state", il))
        self._store_behind(cache, both, v.numel * both.nb[0], il)
        return ops.view(both, v.ne[:3])

    def no_snapshots(self) -> None:
        if self.n_snapshots > 1:
            raise Error("this kind of recurrence keeps no earlier states: give n_rollback=0")
