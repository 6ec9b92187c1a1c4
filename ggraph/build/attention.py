"""Attention: the Q, K, V projections, cells of the cache written and read, both forms of the product.

In: normed hidden states. Out: the attention's output projection. K and V go through the cache by cell index; who sees
what is the mask, which the host fills. Nothing here depends on positions or cells.
"""
from __future__ import annotations

from .. import inputs, ops
from ..dtypes import BF16, F16, F32
from ..memory.cache import KVCache
from ..memory.line import Window
from ..tensor import Tensor
from ..weights import Group, Param
from .core import Core, split


class Attention(Core):
    def qkv(self, w: Group, x: Tensor, il: int, head_k: int = 0, head_v: int = 0, head_q: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Q [head_q, n_head, n_tokens] (with a `head_q` called Qcur_full), K [head_k, n_head_kv, n_tokens], V [head_v, ..]."""
        hp = self.hp
        k_size, v_size = head_k or hp.head_k(il), head_v or hp.head_v(il)
        n_head, n_kv = hp.n_head[il], hp.n_head_kv[il]
        shapes = {"Qcur_full" if head_q else "Qcur": (head_q or k_size, n_head), "Kcur": (k_size, n_kv), "Vcur": (v_size, n_kv)}
        if w.attn_qkv is not None:
            qkv = self._clamp(self._fused_qkv(w, x, il))
            rows = split(qkv, [n * heads for n, heads in shapes.values()])
            heads = [self._heads(r, shape) for r, shape in zip(rows, shapes.values())]
        else:
            heads = [ops.reshape(self._clamp(self.linear(p, x, name, il)), (*shapes[name], self.n_tokens))
                     for name, p in zip(shapes, (w.attn_q, w.attn_k, w.attn_v))]
        q, k, v = (self.cb(h, name, il) for name, h in zip(shapes, heads))
        return q, k, v

    def _fused_qkv(self, w: Group, x: Tensor, il: int) -> Tensor:
        """One product, whose bias the file may hold in three parts."""
        y = self.linear(w.attn_qkv, x, "wqkv", il)
        parts = [p.weight for p in map(vars(w).get, ("attn_q", "attn_k", "attn_v")) if p is not None]
        if len(parts) < 3:
            return y
        q, k, v = parts
        return self.cb(ops.add(y, ops.concat(ops.concat(q, k, 0), v, 0)), "wqkv_b", il)

    def _heads(self, rows: Tensor, shape: tuple[int, int]) -> Tensor:
        """A strided view [n, n_tokens] as [head, n_head, n_tokens]."""
        n, heads = shape
        return ops.view(rows, (n, heads, rows.ne[1]), (n * rows.nb[0], rows.nb[1]))

    def _clamp(self, x: Tensor) -> Tensor:
        limit = self.hp.f_clamp_kqv
        return ops.clamp(x, -limit, limit) if limit else x

    def qk_norm(self, w: Group, q: Tensor, k: Tensor, il: int, whole: bool = False) -> tuple[Tensor, Tensor]:
        """Q and K normed per head, or over all heads together; as they are where the file has no norm for them."""
        return (self._norm_heads(q, w.attn_q_norm, "Qcur_normed", il, whole),
                self._norm_heads(k, w.attn_k_norm, "Kcur_normed", il, whole))

    def _norm_heads(self, x: Tensor, p: Param | None, name: str, il: int, whole: bool) -> Tensor:
        if p is None:
            return x
        if whole:
            flat = ops.reshape(x if x.contiguous else ops.cont(x), (x.ne[0] * x.ne[1], x.ne[2]))
            return ops.reshape(self.norm(flat, p, name, il), x.ne)
        return self.norm(x, p, name, il)

    def gate_attn(self, x: Tensor, gate: Tensor, il: int) -> Tensor:
        """The heads' results [head * n_head, n_tokens] times a gate of each element, or of each head [n_head, n_tokens]."""
        n, (n_gate, n_tokens) = x.ne[0] // gate.ne[0], gate.ne[:2]
        if n > 1:
            y = ops.mul(ops.reshape(x, (n, n_gate, n_tokens)), ops.reshape(gate, (1, n_gate, n_tokens)))
            return self.cb(ops.reshape(y, x.ne), "attn_gated", il)
        return self.cb(ops.mul(x, gate), "attn_gated", il)

    def attn_temperature(self, q: Tensor, il: int) -> Tensor:
        """Queries scaled by Llama 4's temperature, which grows with the position."""
        if not self.hp.f_attn_temp_scale:
            return q
        scale, = self.input(inputs.AttnScale, self.hp, self.n_tokens)
        return self.cb(ops.mul(q, scale), "Qcur_attn_temp_scaled", il)

    def attn(self, wo: Param | None, q: Tensor, k: Tensor | None, v: Tensor | None, il: int, *, scale: float | None = None,
             sinks: Param | None = None, v_b: Param | None = None, seen: Tensor | None = None) -> Tensor:
        """softmax(scale q K + mask) V, then the output projection.

        q [head_k, n_head, n_tokens]; k, v as `qkv` returns them. K and V are what the cache holds, this ubatch's k and v
        written to it first; in a model without a cache they are k and v alone. v is None where it is the first elements
        of k, both are where the layer reads what another one wrote (`HParams.kv_layer`). v_b [.., head_v, n_head]
        multiplies the result of each head. `seen`: a mask for each KV head, as `choose_blocks` makes them.
        """
        scale, sink = self.hp.kq_scale if scale is None else scale, sinks.weight if sinks else None
        if self.hp.cache:
            x = self._attend_cache(q, k, v, il, scale, sink, seen)
        else:
            assert k is not None
            x = self._attend_ubatch(q, k, v, il, scale, sink, seen)
        if v_b is not None:
            x = self.cb(self.mm(v_b, x), "kqv_mla", il)
        return self._attn_out(wo, x, il)

    def cross_attn(self, w: Group, x: Tensor, il: int) -> Tensor:
        """Attention to what the encoder made of the text, with cross_attn_q, _k, _v and _o."""
        hp = self.hp
        states, mask = self.input(inputs.CrossStates, self.memory, hp.n_embd, self.n_tokens)
        q, k, v = (ops.reshape(self.linear(p, y, name, il), (head, n_head, y.ne[1])) for p, y, name, head, n_head in (
            (w.cross_attn_q, x, "Qcur", hp.head_k(il), hp.n_head[il]),
            (w.cross_attn_k, states, "Kcur", hp.head_k(il), hp.n_head_kv[il]),
            (w.cross_attn_v, states, "Vcur", hp.head_v(il), hp.n_head_kv[il])))
        return self._attn_out(w.cross_attn_o, self._attend_ubatch(q, k, v, il, hp.kq_scale, None, mask), il, rotated=False)

    def _attn_out(self, wo: Param | None, x: Tensor, il: int, rotated: bool = True) -> Tensor:
        """The heads' results [head_v, n_tokens_stream, n_head, n_stream] side by side, and the output projection. `rotated`: V is
        what the cache holds, which may be rotated."""
        x = ops.permute(x, (0, 2, 1, 3))                                      # [head_v, n_head, n_tokens_stream, n_stream]
        rows = (x.ne[0] * x.ne[1], self.n_tokens)
        x = self.cb(ops.reshape(x, rows) if x.contiguous else ops.cont(x, rows), "kqv_out", il)
        if n := self._kv(il).rot_v if self.hp.cache and rotated else 0:
            x = ops.hadamard(x, n)
        return x if wo is None else self.linear(wo, x, "attn_out", il)

    def _kv(self, il: int) -> KVCache:
        return self.memory.kv[self.memory.kv_of(self.hp.kv_layer(il))]

    # both: -> [head_v, n_tokens_stream, n_head, n_stream]

    def _attend_cache(self, q: Tensor, k: Tensor | None, v: Tensor | None, il: int, scale: float, sinks: Tensor | None,
                      seen: Tensor | None) -> Tensor:
        kv, cp, n_stream, source = self._kv(il), self.cp, self.n_stream, self.hp.kv_layer(il)
        if k is not None:
            self._store(kv, q, k, v, il)
        q = ops.hadamard(q, kv.rot_k) if kv.rot_k else q
        q = ops.permute(self._by_stream(q), (0, 2, 1, 3))                     # [head, n_tokens_stream, n_head, n_stream]
        keys = ops.permute(kv.get_k(source, n_stream), (0, 2, 1, 3))          # [head, n_kv, n_head_kv, n_stream]
        values = ops.permute(kv.get_v(source, n_stream), (0, 2, 1, 3))
        mask = self._mask(kv) if seen is None else seen
        if cp.flash_attn and seen is None:
            cells, spans = self.input(inputs.KVCells, self.memory, kv.index, kv.n_cells, self.n_tokens, cp.causal)
            return self._flash(q, keys, values, mask, il, scale, sinks, cells, spans)
        return self._attn_mha(q, keys, values, mask, il, scale, sinks)

    def _mask(self, kv: KVCache) -> Tensor:
        """F32 [n_kv, n_tokens_stream, 1, n_stream]"""
        return self.input(inputs.KQMask, self.memory, kv.index, kv.n_kv, self.n_tokens_stream, self.n_stream, self.cp.causal,
                          self.hp.f_max_alibi_bias > 0)[0]

    def _store(self, kv: KVCache, q: Tensor, k: Tensor, v: Tensor | None, il: int) -> None:
        """Write k and v to the cells of this ubatch; all of q, k and v is computed before."""
        k = ops.hadamard(k, kv.rot_k) if kv.rot_k else k
        v = ops.hadamard(v, kv.rot_v) if v is not None and kv.rot_v else v
        for node in (q, k, v):
            if node is not None:
                self.g.expand(node)
        idx, = self.input(inputs.CellIds, self.memory, kv.index, self.n_tokens)
        self.g.expand(kv.cpy_k(k, idx, il))
        if v is not None:
            self.g.expand(kv.cpy_v(v, idx, il))

    def _attend_ubatch(self, q: Tensor, k: Tensor, v: Tensor | None, il: int, scale: float, sinks: Tensor | None,
                       seen: Tensor | None) -> Tensor:
        assert v is not None, "V as a part of K is read from the cache"
        mask = self._ubatch_mask(il) if seen is None else seen
        q, k, v = (ops.permute(x, (0, 2, 1, 3)) for x in (q, k, v))           # [head, n_tokens, n_head]
        form = self._flash if self.cp.flash_attn and seen is None else self._attn_mha
        return form(q, k, v, mask, il, scale, sinks)

    def _ubatch_mask(self, il: int) -> Tensor:
        """F32 [n_tokens, n_tokens]"""
        hp = self.hp
        window = Window(hp.n_swa, hp.swa_type) if hp.is_swa(il) else Window()
        return self.input(inputs.UbatchMask, self.n_tokens, window, self.cp.causal, hp.f_max_alibi_bias > 0)[0]

    def distances(self, p: Param) -> Tensor:
        """T5's mask of each head [n, n_tokens, n_head], n the tokens of the ubatch or the cells of the cache: what p [n_head,
        n_buckets] says of the distance of two tokens."""
        n_head, n_buckets = p.weight.ne[:2]
        if self.hp.cache:
            kv = self._kv(0)
            buckets, = self.input(inputs.CellDistances, self.memory, kv.index, kv.n_kv, self.n_tokens, int(n_buckets))
            mask = self._mask(kv)
        else:
            buckets, = self.input(inputs.Distances, self.n_tokens, int(n_buckets))
            mask = self._ubatch_mask(0)
        shape = (n_head, mask.ne[0], mask.ne[1], mask.ne[3])
        bias = ops.permute(ops.reshape(ops.get_rows(p.weight, buckets), shape), (2, 0, 1, 3))
        return ops.add(self.cb(ops.cont(bias), "pos_bias"), mask)

    @property
    def n_stream(self) -> int:
        return 1 if self.cp.kv_unified else self.dims.n_seqs

    @property
    def n_tokens_stream(self) -> int:
        return self.n_tokens if self.cp.kv_unified else self.dims.n_seq_tokens

    def _by_stream(self, q: Tensor) -> Tensor:
        """[head, n_head, n_tokens] -> [head, n_head, n_tokens / n_stream, n_stream]"""
        n = self.n_tokens_stream
        return ops.view(q, (q.ne[0], q.ne[1], n, self.n_stream), (q.nb[1], q.nb[2], q.nb[2] * n))

    def _flash(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, il: int, scale: float, sinks: Tensor | None,
               cells: Tensor | None = None, spans: Tensor | None = None) -> Tensor:
        x = ops.flash_attn_ext(q, k, v, mask, sinks, cells, spans, scale=scale, max_bias=self.hp.f_max_alibi_bias,
                               logit_softcap=self.hp.f_attn_logit_softcapping)
        return ops.permute(self.cb(x, "kqv", il), (0, 2, 1, 3))

    def _attn_mha(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, il: int, scale: float,
                  sinks: Tensor | None) -> Tensor:
        kq = self.cb(ops.mul_mat(k, self._rounded(q, k)), "kq", il)           # [n_kv, n_tokens_stream, n_head, n_stream]
        if cap := self.hp.f_attn_logit_softcapping:
            kq = self.cb(ops.scale(ops.tanh(ops.scale(kq, scale / cap)), cap), "kq_scaled", il)
            scale = 1.0
        if mask is not None and mask.ne[2] > 1:
            kq, mask = self._masked(kq, mask), None
        kq = self.cb(ops.soft_max(kq, mask, sinks, scale, self.hp.f_max_alibi_bias), "kq_soft_max", il)
        v = ops.cast(v, F32) if v.type.quantized else v                       # blocks cannot be transposed
        return self.cb(ops.mul_mat(ops.cont(ops.transpose(v)), self._rounded(kq, v)), "kqv", il)

    @staticmethod
    def _masked(kq: Tensor, mask: Tensor) -> Tensor:
        """kq [n_kv, n_tokens, n_head, n_stream] plus the mask of each KV head, which neighbouring heads share."""
        n_kv, n, n_head, n_stream = kq.ne
        groups = mask.ne[2] * n_stream
        by_group = ops.reshape(kq, (n_kv, n, n_head // mask.ne[2], groups))
        return ops.reshape(ops.add(by_group, ops.reshape(mask, (n_kv, n, 1, groups))), kq.ne)

    @staticmethod
    def _rounded(x: Tensor, cached: Tensor) -> Tensor:
        """x in the type of a 16-bit cache: ggml multiplies in that type, and close calls (which expert) depend on it."""
        return ops.cast(x, cached.type) if cached.type in (F16, BF16) else x
