"""The mixes that people know by name (Q4_K_M, IQ3_M, ...): which type each tensor gets, as llama.cpp chooses it.

In: a mix, the names and shapes of a model's tensors, a few of its sizes. Out: a type for each. What a mix asks for depends
on a tensor's role, on how far down the model it lies, and on how many heads share a K/V head. Facts: src/llama-quant.cpp.
"""
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import ggraph
from ggraph import dtypes as t
from ggraph.dtypes import DType


class Mix(NamedTuple):
    """`id`: general.file_type. `base`: the type of what no rule touches."""
    name: str
    id: int
    base: DType


MIXES = {mix.name: mix for mix in (
    Mix("F32", 0, t.F32), Mix("F16", 1, t.F16), Mix("BF16", 32, t.BF16), Mix("Q4_0", 2, t.Q4_0), Mix("Q4_1", 3, t.Q4_1),
    Mix("Q5_0", 8, t.Q5_0), Mix("Q5_1", 9, t.Q5_1), Mix("Q8_0", 7, t.Q8_0), Mix("Q2_K", 10, t.Q2_K), Mix("Q2_K_S", 21, t.Q2_K),
    Mix("Q3_K_S", 11, t.Q3_K), Mix("Q3_K_M", 12, t.Q3_K), Mix("Q3_K_L", 13, t.Q3_K), Mix("Q4_K_S", 14, t.Q4_K),
    Mix("Q4_K_M", 15, t.Q4_K), Mix("Q5_K_S", 16, t.Q5_K), Mix("Q5_K_M", 17, t.Q5_K), Mix("Q6_K", 18, t.Q6_K),
    Mix("IQ1_S", 24, t.IQ1_S), Mix("IQ1_M", 31, t.IQ1_M), Mix("IQ2_XXS", 19, t.IQ2_XXS), Mix("IQ2_XS", 20, t.IQ2_XS),
    Mix("IQ2_S", 28, t.IQ2_XS), Mix("IQ2_M", 29, t.IQ2_S), Mix("IQ3_XXS", 23, t.IQ3_XXS), Mix("IQ3_XS", 22, t.IQ3_S),
    Mix("IQ3_S", 26, t.IQ3_S), Mix("IQ3_M", 27, t.IQ3_S), Mix("IQ4_NL", 25, t.IQ4_NL), Mix("IQ4_XS", 30, t.IQ4_XS),
    Mix("TQ1_0", 36, t.TQ1_0), Mix("TQ2_0", 37, t.TQ2_0), Mix("MXFP4_MOE", 38, t.MXFP4))}
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "MXFP4": "MXFP4_MOE"}
BY_ID = {mix.id: mix for mix in MIXES.values()}

# Where rows are not whole blocks of 256, a type with blocks of 32 takes the place; where not even those, F16.
FALLBACK = {**dict.fromkeys((t.IQ1_S, t.IQ1_M, t.IQ2_XXS, t.IQ2_XS, t.IQ2_S, t.IQ3_XXS, t.IQ3_S, t.IQ4_XS), t.IQ4_NL),
            **dict.fromkeys((t.Q2_K, t.Q3_K, t.TQ1_0, t.TQ2_0), t.Q4_0), t.Q4_K: t.Q5_0, t.Q5_K: t.Q5_1, t.Q6_K: t.Q8_0}
LOW = {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M"}
NEEDS_IMPORTANCE = {t.IQ3_XXS, t.IQ2_XXS, t.IQ2_XS, t.IQ2_S, t.IQ1_M, t.IQ1_S}

# Parts of names that stay as they are: small, or sensitive, or no matrices at all.
KEPT = ("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel", "per_layer_model_proj", "ssm_conv1d",
        "shortconv.conv.weight", "indexer.k_proj.weight", "indexer.q_proj.weight", "attn_rel_b.weight", ".position_embd",
        "sam.pos_embd", "sam.neck.", "sam.net_", ".rel_pos", ".patch_embd", ".patch_merger", "a.rvq.codebook", "mm.a.code_embd",
        *(f"time_mix_{name}.weight" for name in ("first", "w0", "w1", "w2", "v0", "v1", "v2", "a0", "a1", "a2", "g1", "g2",
                                                 "decay_w1", "decay_w2", "lerp_fused")))
KEPT_WHOLE = ("position_embd.weight", "token_types.weight")
EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
ROLES = ("attn_qkv.weight", "attn_kv_b.weight", "attn_v.weight", "attn_k.weight", "attn_q.weight", "attn_output.weight",
         "ffn_up", "ffn_gate", "ffn_down")

# Architectures that llama.cpp's rules name: falcon spends its bits elsewhere; so many layers mean a 70B model whose attn_v
# is small (in llama only where K/V heads are shared); in bailingmoe3, matrices with three axes need not be experts.
SPENDS_ELSEWHERE = {"falcon"}
LAYERS_OF_70B = {"llama": (80, True), "deci": (80, False), "olmo": (80, False), "qwen2": (80, False), "jais2": (68, False)}
STACKED_PROJECTIONS = {"bailingmoe3"}


class Shaped(Protocol):
    """What is asked of a tensor: a name, elements per axis, and its type now."""
    @property
    def name(self) -> str: ...
    @property
    def ne(self) -> tuple[int, ...]: ...
    @property
    def type(self) -> DType: ...


@dataclass(frozen=True)
class Sizes:
    """What the rules ask of a model."""
    arch: str
    n_layer: int
    n_expert: int = 0
    n_gqa: int = 1
    big: bool = False                   # a 70B whose K/V heads are shared

    @classmethod
    def read(cls, kv: Mapping[str, Any]) -> Sizes:
        """From the key/values of a file; what is missing is 0, as llama.cpp has it."""
        arch = str(kv.get("general.architecture", ""))

        def first(key: str) -> int:
            value = kv.get(f"{arch}.{key}", 0)
            return int(value if isinstance(value, int | float) else value[0] if len(value) else 0)
        n_layer, n_head = first("block_count"), first("attention.head_count")
        n_head_kv = first("attention.head_count_kv") or n_head
        n_big, shared = LAYERS_OF_70B.get(arch, (-1, False))
        big = n_layer == n_big and (n_head != n_head_kv or not shared)
        return cls(arch, n_layer, first("expert_count"), n_head // n_head_kv if n_head_kv else 0, big)


@dataclass(frozen=True)
class Wishes:
    """What the user wants otherwise. `tensor_types`: (regular expression found in the name, type), the first that matches wins."""
    pure: bool = False
    leave_output: bool = False
    output: DType | None = None
    token_embedding: DType | None = None
    tensor_types: Sequence[tuple[str, DType]] = ()


def mix(name: str) -> Mix:
    """The mix called `name`, in any case, or with this number. `ggraph.Error` names the known ones."""
    if found := find(name):
        return found
    raise ggraph.Error(f"{name!r} is no type or mix to quantize to; there are {', '.join(MIXES)}")


def find(name: str) -> Mix | None:
    wanted = ALIASES.get(name.upper(), name.upper())
    return next((known for known in MIXES.values() if wanted in (known.name, str(known.id))), None)


def quantizes(tensor: Shaped, leave_output: bool = False) -> bool:
    """Is this tensor a matrix that takes a quantized type?"""
    name = tensor.name
    return (_n_dims(tensor.ne) > 1 and name.endswith("weight") and name not in KEPT_WHOLE
            and not any(part in name for part in KEPT) and not (leave_output and name == "output.weight"))


def _n_dims(ne: Sequence[int]) -> int:
    return max((axis + 1 for axis, n in enumerate(ne) if n > 1), default=1)


def in_order(tensors: Sequence[Shaped]) -> list[Shaped]:
    """By layer, then by name: the order in which the rules count."""
    def key(tensor: Shaped) -> tuple[int, str]:
        found = re.match(r"blk\.(\d+)\.", tensor.name)
        return (int(found[1]) if found else -1), tensor.name
    return sorted(tensors, key=key)


def choose(chosen: Mix, tensors: Sequence[Shaped], sizes: Sizes, wishes: Wishes | None = None,
           importance: bool = False, displaced: list[str] | None = None) -> dict[str, DType]:
    """The type of every tensor by name. `importance`: is there an importance matrix? Some rules look. `displaced` takes the names
    of those whose rows are no whole blocks of the type that they should have had."""
    rules = _Rules(chosen, sizes, wishes or Wishes(), importance, tied=all(x.name != "output.weight" for x in tensors),
                   n_attn_v=sum(_role(x.name) in _V_LIKE for x in tensors))
    types = {tensor.name: rules.type_of(tensor) for tensor in in_order(tensors)}
    if displaced is not None:
        displaced += rules.displaced
    return types


_V_LIKE = ("attn_qkv.weight", "attn_kv_b.weight", "attn_v.weight")


def _role(name: str) -> str:
    if name == "output.weight" or name in EMBEDDINGS:
        return "output" if name == "output.weight" else "embedding"
    return next((role for role in ROLES if role in name), "")


def fallback(wanted: DType, n: int) -> DType:
    """`wanted`, or what takes its place for rows of `n` elements."""
    if n % wanted.block == 0:
        return wanted
    other = FALLBACK.get(wanted, wanted)
    return other if n % other.block == 0 else t.F16


@dataclass
class _Rules:
    """The choice for one file: what was asked, how many matrices of a role have been seen, whose type another took the place of."""
    mix: Mix
    sizes: Sizes
    wishes: Wishes
    importance: bool
    tied: bool
    n_attn_v: int
    seen: dict[str, int] = field(default_factory=dict)
    displaced: list[str] = field(default_factory=list)

    def type_of(self, tensor: Shaped) -> DType:
        wishes, role = self.wishes, _role(tensor.name)
        if not quantizes(tensor, wishes.leave_output):
            return tensor.type
        named = next((kind for pattern, kind in wishes.tensor_types if re.search(pattern, tensor.name)), None)
        apart = named is not None and tensor.name == EMBEDDINGS[1]
        if wishes.token_embedding and role == "embedding" and not apart:
            return wishes.token_embedding
        if wishes.output and role == "output":
            return wishes.output
        if not self.mix.base.quantized:
            return self.mix.base
        wanted = named or (self.mix.base if wishes.pure else self.rule(tensor, role))
        taken = fallback(wanted, tensor.ne[0])
        if taken is not wanted:
            self.displaced.append(tensor.name)
        return taken

    def rule(self, tensor: Shaped, role: str) -> DType:
        if role == "output" or (role == "embedding" and self.tied):
            return self.wishes.output or self.output(tensor)
        if self.mix.name == "MXFP4_MOE":
            return self.experts_only(tensor, role)
        if role == "embedding":
            return self.embedding()
        if self.mix.name in LOW:
            return self.low(role)
        if role in _V_LIKE:
            return self.attn_v(self.count("attn_v"))
        rule = {"attn_k.weight": self.attn_qk, "attn_q.weight": self.attn_qk, "ffn_down": self.ffn_down,
                "ffn_gate": self.ffn_in, "ffn_up": self.ffn_in, "attn_output.weight": self.attn_output}.get(role)
        return rule(tensor, role) if rule else self.mix.base

    def count(self, role: str) -> int:
        """How many of this role came before."""
        self.seen[role] = self.seen.get(role, 0) + 1
        return self.seen[role] - 1

    def layer(self, tensor: Shaped, role: str) -> int:
        """Which layer of its role the matrix is in; experts come in no order, so there its name tells."""
        found = re.match(r"blk\.(\d+)\.", tensor.name)
        n = self.count(role)
        return int(found[1]) if self.sizes.n_expert > 1 and found else n

    def output(self, tensor: Shaped) -> DType:
        base = self.mix.base
        if self.mix.name == "MXFP4_MOE" or self.sizes.arch in SPENDS_ELSEWHERE or tensor.ne[0] % base.block:
            return t.Q8_0
        if self.mix.name in LOW | {"IQ3_XXS"}:
            return t.Q5_K
        return base if base == t.Q8_0 else t.Q6_K

    def experts_only(self, tensor: Shaped, role: str) -> DType:
        stacked = len(tensor.ne) > 2 and tensor.ne[2] > 1
        expert = self.sizes.arch not in STACKED_PROJECTIONS or role.startswith("ffn_")
        return t.MXFP4 if stacked and expert else t.Q8_0

    def embedding(self) -> DType:
        return {**dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ1_S", "IQ1_M"), t.Q2_K),
                **dict.fromkeys(("IQ2_S", "IQ2_M", "IQ3_XXS"), t.IQ3_S),
                **dict.fromkeys(("TQ1_0", "TQ2_0"), t.Q4_K)}.get(self.mix.name, self.mix.base)

    def low(self, role: str) -> DType:
        """At two bits and less."""
        sizes, upper = self.sizes, self.mix.name in ("IQ2_S", "IQ2_M")
        if role in _V_LIKE:
            return t.Q4_K if sizes.n_gqa >= 4 or sizes.n_expert >= 4 else t.IQ3_S if upper else t.Q2_K
        if role == "attn_k.weight" and sizes.n_expert == 8:
            return t.Q4_K
        if role == "ffn_down" and self.count(role) < sizes.n_layer // 8:
            return t.IQ3_S if upper else t.Q2_K
        if role == "attn_output.weight":
            if sizes.n_expert == 8:
                return t.Q5_K
            return t.IQ3_S if upper else t.IQ2_XXS if self.mix.name in ("IQ1_S", "IQ1_M") else self.mix.base
        return self.mix.base

    def attn_v(self, i: int) -> DType:
        name, shared = self.mix.name, self.sizes.n_gqa >= 4
        wanted = self.mix.base
        if name == "Q2_K":
            wanted = t.Q4_K if shared else t.Q3_K
        elif name == "IQ3_XXS":
            wanted = t.Q4_K if shared else t.IQ3_XXS if self.importance else t.IQ3_S
        elif name == "IQ3_M" or (shared and name in ("Q2_K_S", "IQ3_XS", "IQ3_S")):
            wanted = t.Q4_K
        elif name == "Q3_K_M":
            wanted = t.Q5_K if i < 2 else t.Q4_K
        elif name == "Q3_K_L" or (shared and name in ("IQ4_NL", "IQ4_XS")) or (name == "Q4_K_S" and i < 4):
            wanted = t.Q5_K
        elif name in ("Q4_K_M", "Q5_K_M") and _more_bits(i, self.n_attn_v):
            wanted = t.Q6_K
        if self.sizes.big and wanted in (t.Q3_K, t.Q4_K):
            wanted = t.Q5_K
        return t.Q8_0 if self.sizes.n_expert == 8 else wanted

    def attn_qk(self, tensor: Shaped, role: str) -> DType:
        if role == "attn_k.weight" and self.sizes.n_expert == 8:
            return t.Q8_0
        return {"IQ3_XS": t.IQ3_XXS, "IQ3_XXS": t.IQ2_S}.get(self.mix.name, self.mix.base)

    def ffn_in(self, tensor: Shaped, role: str) -> DType:
        i, n = self.layer(tensor, role), self.sizes.n_layer
        return t.IQ3_XXS if self.mix.name == "IQ3_XS" and n // 8 <= i < 7 * n // 8 else self.mix.base

    def ffn_down(self, tensor: Shaped, role: str) -> DType:
        i, n = self.layer(tensor, role), self.sizes.n_layer
        first, more, usual = i < n // 8, _more_bits(i, n), self.sizes.arch not in SPENDS_ELSEWHERE
        base, name = self.mix.base, self.mix.name
        if name == "Q3_K_M":
            return t.Q5_K if i < n // 16 else t.Q4_K if usual or more else t.Q3_K
        if name == "Q4_K_M" and not usual:
            return t.Q6_K if i < n // 16 else t.Q5_K if more else t.Q4_K
        return {"Q2_K": t.Q3_K, "Q2_K_S": t.Q4_K if first else base, "Q3_K_L": t.Q5_K if usual else t.Q4_K,
                "IQ3_XXS": base if self.importance else t.Q4_K if first else t.Q3_K,
                "IQ3_M": t.Q4_K if first or (self.sizes.n_expert == 8 and more) else base,
                "Q4_K_M": t.Q6_K if more else base, "Q5_K_M": t.Q6_K if more else base,
                "IQ4_NL": t.Q5_K if first and not self.importance else base,
                "IQ4_XS": t.Q5_K if first and not self.importance else base, "Q4_K_S": t.Q5_K if first and usual else base,
                "Q4_0": t.Q4_1 if first and self.importance else base,
                "Q5_0": t.Q5_1 if first and self.importance else base}.get(name, base)

    def attn_output(self, tensor: Shaped, role: str) -> DType:
        base, name = self.mix.base, self.mix.name
        if self.sizes.arch in SPENDS_ELSEWHERE:
            return t.Q4_K if name == "Q3_K_L" else base
        if self.sizes.n_expert == 8:
            eight = ("Q2_K", "IQ3_XS", "IQ3_XXS", "Q3_K_S", "Q3_K_M", "IQ4_NL", "Q4_K_S", "Q4_K_M", "IQ3_S", "IQ3_M", "IQ4_XS")
            return t.Q5_K if name in eight else base
        return {"Q2_K": t.Q3_K, "IQ3_XXS": t.IQ3_S, "Q3_K_M": t.Q4_K, "Q3_K_L": t.Q5_K, "IQ3_M": t.Q4_K}.get(name, base)


def _more_bits(i: int, n: int) -> bool:
    """The first and the last eighth, and every third between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2
