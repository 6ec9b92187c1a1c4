"""The tensor table of a model: which tensors an architecture declares, checked against what the file holds.

In: a GGUF file and its hyperparameters; the architecture's `weights(t)` declares names and shapes. Out: leaf tensors over
the mapped bytes, grouped as weight, bias and scale under the name they have in the file. It knows nothing about graphs.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from . import dtypes
from .backend import HostBuffer
from .errors import ModelError
from .gguf import File, TensorInfo
from .hparams import HParams
from .tensor import Tensor, leaf

FLOATS = (dtypes.F32, dtypes.F16, dtypes.BF16)
Need = bool | None                  # True: required, None: taken if the file has it, False: not declared


class Param:
    """One entry of the table: `blk.0.attn_q.weight`, and `.bias` and `.scale` where the file has them."""
    __slots__ = ("bias", "name", "scale", "weight")

    def __init__(self, name: str, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None):
        self.name, self.weight, self.bias, self.scale = name, weight, bias, scale

    def __iter__(self) -> Iterator[Tensor]:
        return (t for t in (self.weight, self.bias, self.scale) if t is not None)


class Group:
    """Entries by name; an optional entry that the file lacks is None, an undeclared one an AttributeError."""

    def __init__(self, table: Weights, prefix: str = ""):
        self._table, self._prefix = table, prefix

    def __call__(self, name: str, *ne: int, bias: Need = False, optional: bool = False, suffix: str = ".weight") -> Param | None:
        """Declare an entry of shape `ne` (contiguous axis first)."""
        param = self._table.take(self._prefix + name, ne, bias, optional, suffix)
        setattr(self, name.replace(".", "_"), param)
        return param

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the architecture declares no weight {self._prefix + name!r}")

    def alias(self, attribute: str, param: Param | None) -> None:
        """The same entry under the name that a block asks for."""
        setattr(self, attribute, param)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape that the file gives a tensor, by its full name here; () if there is none."""
        info = self._table.file.tensors.get(self._prefix + name)
        return info.ne if info else ()

    def unused(self, *names: str) -> None:
        """Tensors, by full name, that files may hold and that the graph does not read, and scales of theirs."""
        for stem in (self._prefix + name.removesuffix(".weight") for name in names):
            self._table.ignored.update(stem + suffix for suffix in ("", ".weight", ".scale", ".input_scale"))

    # --- the groups that most architectures share

    def norm(self, *names: str, bias: Need = False, n: int = 0, optional: bool = False) -> None:
        for name in names:
            self(name, n or self._table.hp.n_embd, bias=bias, optional=optional)

    def qkv(self, il: int, bias: Need = None, head_k: int = 0, head_v: int = 0, head_q: int = 0) -> None:
        """attn_q, attn_k, attn_v, or the three in one attn_qkv, whichever the file has. One matrix may have three biases.

        `head_q`: rows that attn_q has for each head, where there is more in it than Q.
        """
        hp = self._table.hp
        head_k, head_v = head_k or hp.head_k(il), head_v or hp.head_v(il)
        sizes = {"attn_q": (head_q or head_k) * hp.n_head[il], "attn_k": head_k * hp.n_head_kv[il],
                 "attn_v": head_v * hp.n_head_kv[il]}
        fused = self("attn_qkv", hp.n_embd, sum(sizes.values()), bias=bias, optional=True)
        for name, n in sizes.items():
            if fused is None:
                self(name, hp.n_embd, n, bias=bias)
            elif bias is not False and fused.bias is None:
                self(name, n, suffix=".bias", optional=True)
            else:
                self.alias(name, None)

    def indexer(self) -> None:
        """indexer.q_proj, k_proj and the norms of both: what blocks of tokens are chosen by."""
        hp, x = self._table.hp, self._table.hp.indexer
        assert x is not None
        self("indexer.q_proj", hp.n_embd, x.head * x.n_head)
        self("indexer.k_proj", hp.n_embd, x.head)
        self.norm("indexer.q_norm", "indexer.k_norm", n=x.head)

    def mla(self, il: int) -> None:
        """Latent attention: attn_q_a and _b (or attn_q), attn_kv_a_mqa, attn_k_b and attn_v_b (or attn_kv_b), attn_output."""
        hp = self._table.hp
        n_head, head_k, head_v, n_q = hp.n_head[il], hp.n_embd_head_k_mla, hp.n_embd_head_v_mla, hp.n_lora_q
        nope = head_k - hp.n_rot
        if n_q:
            self("attn_q_a", hp.n_embd, n_q)
            self.norm("attn_q_a_norm", n=n_q)
        self("attn_q_b" if n_q else "attn_q", n_q or hp.n_embd, n_head * head_k)
        self("attn_kv_a_mqa", hp.n_embd, hp.n_lora_kv + hp.n_rot)
        self.norm("attn_kv_a_norm", n=hp.n_lora_kv)
        if hp.is_mla:
            self("attn_k_b", nope, hp.n_lora_kv, n_head)
            self("attn_v_b", hp.n_lora_kv, head_v, n_head)
        else:
            self("attn_kv_b", hp.n_lora_kv, n_head * (nope + head_v))
        self("attn_output", n_head * head_v, hp.n_embd)

    def mamba(self, norms: bool = False) -> None:
        """Mamba 1: ssm_in, ssm_conv1d, ssm_x, ssm_dt, ssm_a, ssm_d, ssm_out, and with `norms` those of the step, B and C."""
        hp = self._table.hp
        inner, d_state = hp.ssm_d_inner, hp.ssm_d_state
        self("ssm_in", hp.n_embd, 2 * inner)
        self("ssm_conv1d", hp.ssm_d_conv, inner, bias=True)
        self("ssm_x", inner, hp.ssm_dt_rank + 2 * d_state)
        self("ssm_dt", hp.ssm_dt_rank, inner, bias=True)
        self("ssm_a", d_state, inner, suffix="")
        self("ssm_d", inner, suffix="")
        self("ssm_out", inner, hp.n_embd)
        if norms:
            self.norm("ssm_dt_norm", n=hp.ssm_dt_rank)
            self.norm("ssm_b_norm", "ssm_c_norm", n=d_state)

    def mamba2(self, bias: Need = None, norm: bool = True) -> None:
        """Mamba 2: ssm_in, ssm_conv1d (with a bias as `bias` says), the step's bias, ssm_a, ssm_d, ssm_norm, ssm_out."""
        hp = self._table.hp
        inner, n_head, n_conv = hp.ssm_d_inner, hp.ssm_dt_rank, hp.ssm_d_inner + 2 * hp.ssm_n_group * hp.ssm_d_state
        if not n_head or not hp.ssm_n_group or inner % n_head or inner % hp.ssm_n_group:
            raise ModelError(f"{hp.arch}.ssm: {inner} channels cannot be {n_head} heads in {hp.ssm_n_group} groups")
        self("ssm_in", hp.n_embd, inner + n_conv + n_head)
        self("ssm_conv1d", hp.ssm_d_conv, n_conv, bias=bias)
        self("ssm_dt", n_head, suffix=".bias")
        self("ssm_a", 1, n_head, suffix="")
        self("ssm_d", 1, n_head, suffix="")
        self("ssm_norm", inner // hp.ssm_n_group, hp.ssm_n_group, optional=not norm)
        self("ssm_out", inner, hp.n_embd)

    def attn_out(self, il: int, bias: Need = None, head_v: int = 0) -> None:
        hp = self._table.hp
        self("attn_output", (head_v or hp.head_v(il)) * hp.n_head[il], hp.n_embd, bias=bias)

    def ffn(self, il: int, bias: Need = None, gate: Need = True, n_ff: int = 0, suffix: str = "") -> None:
        """ffn_up, ffn_down and ffn_gate; with `suffix`, say "_shexp", those of the shared expert."""
        hp = self._table.hp
        n = n_ff or hp.n_ff[il]
        if gate is not False:
            self("ffn_gate" + suffix, hp.n_embd, n, bias=bias, optional=gate is None)
        self("ffn_up" + suffix, hp.n_embd, n, bias=bias)
        self("ffn_down" + suffix, n, hp.n_embd, bias=bias)

    def experts(self, il: int, n_ff: int = 0, bias: Need = False, gate: Need = True, probs_bias: Need = False,
                probs_suffix: str = ".bias", n_embd: int = 0) -> None:
        """The router ffn_gate_inp and the experts' ffn_{gate,up,down}_exps, gate and up possibly merged in ffn_gate_up_exps.

        `n_embd`: the width that the experts work on, if it is not the model's.
        """
        hp = self._table.hp
        n, e, m = n_ff or hp.n_ff_exp[il] or hp.n_ff[il], hp.n_expert, n_embd or hp.n_embd
        self("ffn_gate_inp", hp.n_embd, e, bias=bias)
        self("exp_probs_b", e, suffix=probs_suffix, optional=probs_bias is not True)
        merged = self("ffn_gate_up_exps", m, 2 * n, e, bias=bias, optional=True)
        self("ffn_gate_exps", m, n, e, bias=bias, optional=merged is not None or gate is not True)
        self("ffn_up_exps", m, n, e, bias=bias, optional=merged is not None)
        self("ffn_down_exps", n, m, e, bias=bias)


def weight_of(info: TensorInfo) -> Tensor:
    """A tensor of a file over its mapped bytes; `ModelError` for a type that nothing can be multiplied with."""
    if not info.type.quantized and info.type not in FLOATS:
        raise ModelError(f"tensor {info.name!r} is of type {info.type}; weights are of a quantized type, F32, F16 or BF16")
    tensor = leaf(info.type, info.ne, info.name)
    tensor.buffer = HostBuffer(info.data)
    return tensor


class Weights(Group):
    """The whole table: top-level entries are attributes, the entries of layer `il` are in `blk[il]`."""

    def __init__(self, file: File, hp: HParams):
        super().__init__(self)
        self.file, self.hp = file, hp
        self.leaves: dict[str, Tensor] = {}                # every declared tensor of the file by its full name
        self.ignored: set[str] = set()
        self.blk = [Group(self, f"blk.{il}.") for il in range(hp.n_layer)]
        self.enc: list[Group] = []                         # the layers of an encoder beside these

    def layers(self) -> Iterator[tuple[int, Group]]:
        return iter(enumerate(self.blk[:self.hp.n_layer]))

    def nextn(self) -> tuple[int, Group]:
        """Declare what the block for next-token prediction has besides a layer's entries; its number, and its entries."""
        hp = self.hp
        if hp.n_layer_nextn > 1:
            raise ModelError(f"{hp.arch}.nextn_predict_layers is {hp.n_layer_nextn}; next-token prediction with one block "
                             "alone is supported")
        w = Group(self, f"blk.{hp.n_layer}.")
        w("nextn.eh_proj", 2 * hp.n_embd, hp.n_embd)
        w.norm("nextn.enorm", "nextn.hnorm")
        w("nextn.embed_tokens", hp.n_embd, hp.n_vocab, optional=True)
        w("nextn.shared_head_head", hp.n_embd, hp.n_vocab, optional=True)
        w.norm("nextn.shared_head_norm", optional=True)
        self.blk.append(w)
        return hp.n_layer, w

    def embeddings(self, norm_bias: Need = False, output: Need = None, output_bias: Need = None, norm: bool = True,
                   n_vocab_out: int = 0) -> None:
        """token_embd, output_norm and output; where the file holds one matrix for input and output, it is both (tied)."""
        hp = self.hp
        if self("token_embd", hp.n_embd, hp.n_vocab, optional="output.weight" in self.file.tensors) is None:
            self.token_embd = Param("token_embd", self.required("output.weight", (hp.n_embd, hp.n_vocab)))
        if norm:
            self.norm("output_norm", bias=norm_bias)
        if self("output", hp.n_embd, n_vocab_out or hp.n_vocab, bias=output_bias, optional=output is not True) is None:
            tied = self.required("token_embd.weight", (hp.n_embd, hp.n_vocab))
            self.output = Param("output", tied, None if output_bias is False else self.optional("output.bias", (hp.n_vocab,)))

    def encoder(self, token_types: Need = False, n_cls: int = 0) -> None:
        """token_embd and its norm, token_types, and the classifier that a reranker's file holds."""
        n = self.hp.n_embd
        self("token_embd", n, self.hp.n_vocab)
        self.norm("token_embd_norm", bias=None)
        if token_types is not False:
            n_types = (self.shape("token_types.weight") or (n, 1))[-1]
            self("token_types", n, n_types, optional=token_types is None)
        self.classifier(n_cls)

    def classifier(self, n_cls: int = 0) -> None:
        """cls, cls.norm and cls.output, whichever the file has; `n_cls`: outputs of the first, if not n_embd."""
        n = self.hp.n_embd
        self("cls", n, n_cls or n, bias=None, optional=True)
        self("cls.norm", n, optional=True)
        self("cls.output", n, self.hp.n_cls_out, bias=None, optional=True)

    def rope_factors(self) -> None:
        """llama3's rope_freqs or LongRoPE's two tables, in the file once or in each layer."""
        for name in ("rope_freqs", "rope_factors_long", "rope_factors_short"):
            for where in (self, *self.blk):
                where(name, self.hp.n_rot // 2, optional=True)

    def take(self, name: str, ne: Sequence[int], bias: Need, optional: bool, suffix: str) -> Param | None:
        weight = self.optional(name + suffix, ne) if optional else self.required(name + suffix, ne)
        if weight is None:
            self.ignored.add(name + ".bias")
            return None
        rows = tuple(ne[1:]) or tuple(ne)                 # a vector's bias has its own shape
        get_bias = {True: self.required, None: self.optional}.get(bias)
        scale = self._tensor(name + ".scale") if name + ".scale" in self.file.tensors else None
        self.ignored.add(name + ".input_scale")           # NVFP4: for products that round activations to 4 bits, as none here does
        return Param(name, weight, get_bias(name + ".bias", rows) if get_bias else None, scale)

    def optional(self, name: str, ne: Sequence[int]) -> Tensor | None:
        return self.required(name, ne) if name in self.file.tensors else None

    def required(self, name: str, ne: Sequence[int]) -> Tensor:
        if name not in self.file.tensors:
            raise ModelError(f"tensor {name!r} is not in {self.file.path.name}; architecture {self.hp.arch!r} needs it")
        tensor = self._tensor(name)
        if trim(tensor.ne) != trim(ne):
            raise ModelError(f"tensor {name!r} has shape {list(trim(tensor.ne))}, architecture {self.hp.arch!r} "
                             f"with this metadata expects {list(trim(ne))}")
        return tensor

    def _tensor(self, name: str) -> Tensor:
        if name not in self.leaves:
            self.leaves[name] = weight_of(self.file.tensors[name])
        return self.leaves[name]

    def leftovers(self) -> list[str]:
        """Names of the file's tensors that nothing declared (next-token-prediction blocks aside)."""
        nextn = tuple(f"blk.{il}." for il in range(self.hp.n_layer, self.hp.n_layer + self.hp.n_layer_nextn))
        known = self.leaves.keys() | self.ignored
        return [n for n in self.file.tensors if n not in known and not n.startswith(nextn or ("\0",))]

    def check_leftovers(self) -> None:
        """ModelError if the file holds tensors that nothing declared (next-token-prediction blocks aside)."""
        if rest := self.leftovers():
            raise ModelError(f"{self.file.path.name} holds {len(rest)} tensors that architecture {self.hp.arch!r} does not know: "
                             + ", ".join(rest[:5]) + (", ..." if len(rest) > 5 else ""))


class Audit(Weights):
    """A table that goes on where a tensor is missing or has another shape, and keeps what was wrong in `faults`, by name."""

    def __init__(self, file: File, hp: HParams):
        super().__init__(file, hp)
        self.faults: dict[str, str] = {}

    def required(self, name: str, ne: Sequence[int]) -> Tensor:
        try:
            return super().required(name, ne)
        except ModelError as e:
            self.faults[name] = str(e)
            return leaf(dtypes.F32, tuple(ne), name)


def trim(ne: Sequence[int]) -> tuple[int, ...]:
    """Without trailing axes of length 1."""
    n = list(ne)
    while len(n) > 1 and n[-1] == 1:
        n.pop()
    return tuple(n)
