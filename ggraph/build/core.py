"""The ground of every graph: names, inputs, linear layers, norms, rotation, the rows asked for.

In: hyperparameters, weights, context parameters, sizes. Out: named nodes, `x` in and `x` out. Node names are llama.cpp's,
so that dumps of both can be compared.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import inputs, ops
from ..adapters import TOKEN_EMBD, Adapter, Mix, Pair
from ..cparams import CParams, Rope
from ..drawing import Drawing
from ..dtypes import F32
from ..errors import Error
from ..graph import Graph
from ..hparams import HParams
from ..memory.layers import LayerMemory
from ..size import Size
from ..tensor import Tensor
from ..weights import Group, Param, Weights


@dataclass(frozen=True)
class Dims:
    """The sizes of a batch as variables of the plan, at the largest values that the Context allows."""
    n_tokens: int
    n_seqs: int                     # sequences of an equal-length split
    n_seq_tokens: int
    n_outputs: int

    @classmethod
    def largest(cls, cp: CParams, recurrent: bool) -> Dims:
        n_seqs = cp.n_seq_max if recurrent or not cp.kv_unified else 1
        per_seq = -(-cp.n_ubatch // n_seqs)
        return cls(Size.variable("n_tokens", n_seqs * per_seq), Size.variable("n_seqs", n_seqs),
                   Size.variable("n_seq_tokens", per_seq), Size.variable("n_outputs", n_seqs * per_seq))


class Core:
    def __init__(self, hp: HParams, weights: Weights, cp: CParams, memory: LayerMemory, dims: Dims, embd: bool = False,
                 mix: Mix | None = None, drawing: Drawing | None = None):
        self.hp, self.w, self.cp, self.memory, self.dims = hp, weights, cp, memory, dims
        self.embd, self.mix, self.drawing = embd, mix or Mix(), drawing
        self.adapted: set[str] = set()                  # what of the adapters stands in the graph
        self.g = Graph()
        self.n_tokens = dims.n_tokens
        self._inputs: dict[Any, inputs.Input] = {}

    def layers(self) -> Iterator[tuple[int, Group]]:
        """(il, weights of layer il)"""
        return ((il, self.w.blk[il]) for il in self.hp.layers)

    # --- names and inputs

    def cb(self, x: Tensor, name: str, il: int = -1) -> Tensor:
        """Name a node as llama.cpp does: `attn_norm-3`."""
        x.name = f"{name}-{il}" if il >= 0 else name
        return x

    def input(self, kind: type[inputs.Input], *args: Any) -> tuple[Tensor, ...]:
        """The tensors of an input; the same input asked for twice is one."""
        key = (kind, *(a for a in args if a is not self.memory and a is not self.hp))
        if key not in self._inputs:
            self._inputs[key] = made = kind(*args)
            self.g.inputs.append(made)
        return self._inputs[key].tensors

    def inp_tokens(self) -> Tensor:
        """I32 [n_tokens], or the vectors that were given instead, F32 [n_embd, n_tokens]."""
        if self.drawing is not None and self.drawing.chained:
            return ops.view(self.drawing.token, (self.n_tokens,))           # of one token: what the last step drew
        return self.input(inputs.Tokens, self.hp.n_embd, self.n_tokens, self.embd)[0]

    def inp_embd(self) -> Tensor:
        """The hidden states of the ubatch, F32 [n_embd, n_tokens]: rows of token_embd, or the vectors that were given."""
        x = self.inp_tokens()
        if not self.embd:
            x = self._embed(self.w.token_embd.weight, x)
        if self.hp.f_embedding_scale:
            x = ops.scale(x, self.hp.f_embedding_scale)
        return self.cb(x, "inp_embd")

    def _embed(self, table: Tensor, tokens: Tensor) -> Tensor:
        x = ops.get_rows(table, tokens)
        for pair, scale in self._pairs(table):
            x = ops.add(x, ops.mul_mat(pair.b, self._scaled(ops.get_rows(pair.a, tokens), pair, scale)))
        return x

    def inp_pos(self) -> Tensor:
        n_axes = 4 if self.hp.rope_mode is not None and self.hp.rope_mode & ops.MROPE else 1
        return self.input(inputs.Positions, self.n_tokens, n_axes)[0]

    def out_ids(self, il: int, *xs: Tensor) -> tuple[Tensor, ...]:
        """After the attention of the last layer only the rows asked for go on. Elsewhere nothing happens."""
        if il != self.hp.n_layer - 1 or self.cp.embeddings or self.cp.hidden:
            return xs
        ids, = self.input(inputs.OutputIds, self.dims.n_outputs)
        return tuple(ops.get_rows(x, ids) for x in xs)

    def add(self, x: Tensor, y: Tensor, name: str, il: int = -1) -> Tensor:
        return self.cb(ops.add(x, y), name, il)

    def scale(self, x: Tensor, s: float, name: str, il: int = -1) -> Tensor:
        return self.cb(ops.scale(x, s), name, il)

    # --- layers of one matrix or one vector

    def mm(self, p: Param, x: Tensor) -> Tensor:
        """weight x, and what LoRAs add to it"""
        y = ops.mul_mat(p.weight, x)
        y = ops.mul(y, p.scale) if p.scale is not None else y
        for pair, scale in self._pairs(p.weight):
            a, b = (_turned(pair.b), pair.a) if p.weight.name == TOKEN_EMBD else pair[:2]
            y = ops.add(y, ops.mul_mat(b, self._scaled(ops.mul_mat(a, x), pair, scale)))
        return y

    def linear(self, p: Param, x: Tensor, name: str = "", il: int = -1) -> Tensor:
        """weight x + bias"""
        y = self.mm(p, x)
        if p.bias is not None:
            if name:
                self.cb(y, name, il)
            y = ops.add(y, p.bias)
        return self.cb(y, name, il) if name else y

    def rms_norm(self, x: Tensor, p: Param | None, name: str = "norm", il: int = -1, eps: float = 0.0) -> Tensor:
        return self._affine(ops.rms_norm(x, eps or self.hp.f_norm_rms_eps), p, name, il)

    def layer_norm(self, x: Tensor, p: Param | None, name: str = "norm", il: int = -1) -> Tensor:
        return self._affine(ops.norm(x, self.hp.f_norm_eps), p, name, il)

    def norm(self, x: Tensor, p: Param | None, name: str = "norm", il: int = -1) -> Tensor:
        """RMS norm where the file gives an epsilon for it, layer norm otherwise."""
        return (self.rms_norm if self.hp.f_norm_rms_eps else self.layer_norm)(x, p, name, il)

    def _affine(self, x: Tensor, p: Param | None, name: str, il: int) -> Tensor:
        if p is not None:
            x = ops.mul(self.cb(x, "norm", il), p.weight)
            if p.bias is not None:
                x = ops.add(self.cb(x, "norm_w", il), p.bias)
        return self.cb(x, name, il)

    # --- adapters

    def _adapters(self) -> Iterator[tuple[Adapter, Tensor]]:
        """Each adapter that is on, with its scale, which is an input."""
        if self.mix.adapters:
            yield from zip(self.mix.adapters, self.input(inputs.AdapterScales, self.mix))

    def _pairs(self, weight: Tensor) -> Iterator[tuple[Pair, Tensor]]:
        """What LoRAs add to a weight."""
        for adapter, scale in self._adapters():
            if weight.name in adapter.pairs:
                self.adapted.add(weight.name)
                yield adapter.pairs[weight.name], scale

    @staticmethod
    def _scaled(x: Tensor, pair: Pair, scale: Tensor) -> Tensor:
        """A x, which is thin, times the scale of A B."""
        return ops.mul(x if pair.scale == 1.0 else ops.scale(x, pair.scale), scale)

    def check_adapters(self) -> None:
        """Error if the graph reads a weight and not what an adapter adds to it: it may stand in no place but a product."""
        if not self.mix.adapters:
            return
        read = {s.root.name for n in self.g.nodes for s in n.src if s is not None and s.root.op == "none"}
        for adapter in self.mix.adapters:
            wanted = (adapter.pairs.keys() & read) | {f"direction.{il}" for il in adapter.directions}
            if missing := sorted(wanted - self.adapted):
                raise Error(f"{adapter.path.name} changes {missing[0]!r}, which cannot be changed in architecture {self.hp.arch!r}")

    # --- positions

    def rope(self, x: Tensor, il: int, *, shift: Tensor | None = None, offset: int = 0, pos: Tensor | None = None) -> Tensor:
        """Rotate Q or K [head, n_head, n_tokens] by `inp_pos`, or by `pos`; or leave it in layers without positions (`has_rope`).

        `shift` I32 [n_tokens]: rotate what is rotated already by so many positions more, without YaRN's factor again.
        `offset`: the first element of a head that is rotated.
        """
        hp = self.hp
        if not hp.has_rope(il):
            return x
        assert hp.rope_mode is not None, f"architecture {hp.arch} names no rope mode"
        r = self._rope_swa() if hp.is_swa(il) else self.cp.rope
        if shift is not None:
            r = replace(r, attn_factor=1.0 / (1.0 - 0.1 * math.log(r.freq_scale)) if r.ext_factor else 1.0)
        pos = self.inp_pos() if pos is None else pos
        y = ops.rope(x, pos if shift is None else shift, self._rope_factors(self.w.blk[il]),
                     n_dims=(hp.is_swa(il) and hp.n_rot_swa) or hp.n_rot, mode=hp.rope_mode, freq_base=r.freq_base,
                     freq_scale=r.freq_scale, ext_factor=r.ext_factor, attn_factor=r.attn_factor, beta_fast=r.beta_fast,
                     beta_slow=r.beta_slow, n_ctx_orig=r.n_ctx_orig, sections=hp.rope_sections, offset=offset)
        return self.cb(y, x.name)

    def _rope_swa(self) -> Rope:
        """The rotation of window layers, which may have a base and scale of their own, or none of the scaling."""
        hp, r = self.hp, self.cp.rope
        r = replace(r, freq_base=hp.rope_freq_base_swa or r.freq_base, freq_scale=hp.rope_freq_scale_swa or r.freq_scale)
        return r if hp.rope_scaling_swa else replace(r, freq_scale=1.0, ext_factor=0.0, attn_factor=1.0)

    def _rope_factors(self, w: Group) -> Tensor | None:
        """llama3's factors; else LongRoPE's long or short ones by the context per sequence. Absent in most files."""
        long = "rope_factors_long" if self.cp.n_ctx_seq > self.cp.rope.n_ctx_orig else "rope_factors_short"
        for name in ("rope_freqs", long):
            for where in (w, self.w):
                p = vars(where).get(name)
                if p is not None:
                    weight: Tensor = p.weight
                    return weight
        return None

    def add_positions(self, x: Tensor, p: Param) -> Tensor:
        """x plus the learned embedding of each position."""
        pos = self.cb(ops.get_rows(p.weight, self.inp_pos()), "pos_embd")
        return self.cb(ops.add(x, pos), "inpL")

    def add_token_type(self, x: Tensor) -> Tensor:
        """x plus the embedding of the first token type, which all tokens have; nothing where the file has none."""
        types: Param | None = self.w.token_types
        if types is None:
            return x
        first = as_f32(ops.view(types.weight, types.weight.ne[:1]))
        return self.cb(ops.add(x, first), "inp_typed")

    # --- the end of a layer

    def residual(self, x: Tensor, branch: Tensor, name: str, il: int) -> Tensor:
        """x + branch, the branch scaled where the model says so."""
        if self.hp.f_residual_scale:
            branch = ops.scale(branch, self.hp.f_residual_scale)
        return self.cb(ops.add(branch, x), name, il)

    def layer_out(self, x: Tensor, il: int) -> Tensor:
        """The end of a layer, where control vectors are added."""
        for adapter, scale in self._adapters():
            if il in adapter.directions:
                self.adapted.add(f"direction.{il}")
                x = ops.add(x, ops.mul(as_f32(adapter.directions[il]), scale))
        return self.cb(x, "l_out", il)


def as_f32(x: Tensor) -> Tensor:
    return x if x.type is F32 else ops.cast(x, F32)


def _turned(x: Tensor) -> Tensor:
    """[r, n] -> F32 [n, r]"""
    return ops.cont(ops.transpose(as_f32(x)))


def split(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Views of consecutive pieces of axis 0."""
    out, start = [], 0
    for n in sizes:
        out.append(ops.view(x, (n, *x.ne[1:]), x.nb[1:], start * x.nb[0]))
        start += n
    return out
