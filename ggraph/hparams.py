"""Model hyperparameters: the `{arch}.*` keys of a GGUF as one frozen record.

In: a key/value mapping. Out: `HParams`, which architecture files read and adjust. Field names are llama.cpp's. Values
that a file may give per layer are tuples with one entry per layer. It knows nothing about tensors or graphs.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .errors import ModelError

REQUIRED: Any = object()
# Keys that mean nothing in most architectures, whatever their files say, and the fields that they fill.
FEW_HAVE = {"attention.clamp_kqv": "f_clamp_kqv", "attention.max_alibi_bias": "f_max_alibi_bias",
            "attention.scale": "f_attention_scale", "embedding_scale": "f_embedding_scale", "logit_scale": "f_logit_scale",
            "residual_scale": "f_residual_scale"}
MULTI_AXIS = 8                      # the bit that ggml's rope modes with several positions per token share


class Keys:
    """The keys of one architecture: `keys("context_length")` reads `{arch}.context_length`."""

    def __init__(self, kv: Mapping[str, Any], arch: str):
        self.kv, self.arch = kv, arch

    def __call__(self, name: str, default: Any = REQUIRED) -> Any:
        """The value, `default` if the key is absent; ModelError naming the key if it is required."""
        key = f"{self.arch}.{name}"
        value = self.kv.get(key, default)
        if value is REQUIRED:
            raise ModelError(f"the file lacks the key {key!r}, which architecture {self.arch!r} needs")
        return value

    def number(self, name: str, default: Any = REQUIRED) -> Any:
        """A scalar; ModelError if the file holds something else."""
        value = self(name, default)
        if value is not default and (isinstance(value, str) or not np.isscalar(value)):
            raise ModelError(f"key {self.arch}.{name} should be a number, not {type(value).__name__}")
        return value

    def per_layer(self, name: str, n_layer: int, default: Any = REQUIRED, convert: Callable[[Any], Any] = int) -> tuple[Any, ...]:
        """A value per layer, from an array or one number for all."""
        value = self(name, default)
        if isinstance(value, np.ndarray | list | tuple):
            if len(value) < n_layer:
                raise ModelError(f"key {self.arch}.{name} has {len(value)} values for {n_layer} layers")
            return tuple(convert(x) for x in value[:n_layer])
        return (convert(value),) * n_layer


@dataclass(frozen=True)
class Ngrams:
    """Hashes of a token with the 1, 2, .. before it: for each length some heads, each with a range of rows of one table."""
    factors: tuple[int, ...]                    # of the token, the one before it, ..
    offsets: tuple[int, ...]                    # first row of each head, all heads of one length in turn
    rows: tuple[int, ...]                       # number of rows of each head
    eos: int                                    # hides what is before it, and stands for what is missing
    embd: int                                   # stands for a token given as an embedding


@dataclass(frozen=True)
class Indexer:
    """Layers that attend to the last tokens and to a few blocks of neighbouring positions, whose keys, of a small cache of its own,
    match a query best. Each KV head chooses by the best key of a block, or with `means` all together by the mean of its keys."""
    layers: tuple[bool, ...]
    n_head: int                                 # queries: of KV heads, or whose matches are added up
    head: int                                   # elements of such a key or query
    block: int                                  # positions in a block
    n_blocks: int                               # how many are chosen
    n_local: int = 0                            # of them the last ones (with means: a block that is not complete is seen besides)
    means: bool = False

    @property
    def reach(self) -> int:
        """Up to so many positions no block can be left out."""
        return self.block * self.n_blocks


@dataclass(frozen=True)
class HParams:
    arch: str
    keys: Keys = field(repr=False, compare=False)
    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_layer: int                                # layers that the graph runs (without next-token-prediction blocks)
    n_layer_nextn: int                          # those blocks, which stand behind the layers
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    n_ff: tuple[int, ...]
    n_embd_head_k: int
    n_embd_head_v: int
    n_embd_head_k_swa: int = 0                  # of window layers; 0: as in the others
    n_embd_head_v_swa: int = 0
    n_layer_kv: int = 0                         # layers from this one on read K and V of earlier ones; 0: none does
    first_layer: int = 0                        # where the graph begins: `nextn` runs a block behind the layers
    nextn_normed: bool = True                   # the hidden states that such a block goes on from are those behind the last norm
    n_embd_head_k_mla: int = 0                  # head sizes of latent attention, as its heads see K and V; else as above
    n_embd_head_v_mla: int = 0
    n_lora_q: int = 0                           # sizes of the latent vectors that Q, and K and V, come from; 0: none
    n_lora_kv: int = 0
    is_mla: bool = False                        # the cache holds the latent vectors: K of one head, V its first elements
    encoder: HParams | None = None              # of a model of two parts: what the layers attend to comes from these; else None
    decoder_start: int = -1                     # the token that its answers begin with; -1: BOS
    causal: bool = True
    cache: bool = True                          # False: tokens see their own batch only, and nothing is remembered
    head: bool = True                           # False: no output head; the results are hidden states
    n_pos: int = 0                              # positions that the file has a vector for; 0: all are possible
    n_cls_out: int = 1                          # outputs of a classifier head
    rank_pooling: str = "cls"                   # what a classifier looks at: the first token, or the "mean"
    rank_act: str = "tanh"                      # of its first matrix
    pooling_type: int = -1                      # llama.cpp's enum; -1: the file does not say

    # normalization
    f_norm_eps: float = 0.0
    f_norm_rms_eps: float = 0.0

    # rope
    rope_mode: int | None = None                # ops.NORMAL, ops.NEOX, ...; None: no rotary positions
    rope_layers: tuple[bool, ...] = ()          # which layers have positions at all; (): all
    k_norm_rotated: bool = False                # K is normed after its rotation
    n_rot: int = 0
    n_rot_swa: int = 0                          # of window layers; 0: as in the others
    rope_freq_base: float = 10000.0
    rope_freq_scale: float = 1.0
    rope_freq_base_swa: float = 0.0             # of window layers; 0: as in the others
    rope_freq_scale_swa: float = 0.0
    rope_scaling_swa: bool = True               # False: window layers rotate without any scaling of positions
    rope_scaling: str = "linear"                # none, linear, yarn, longrope
    rope_attn_factor: float = 1.0
    rope_sections: tuple[int, ...] = (0, 0, 0, 0)
    n_ctx_orig_yarn: int = 0
    yarn_ext_factor: float = -1.0
    yarn_attn_factor: float = 1.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    rope_yarn_log_mul: float = 0.0
    yarn_mscale: float = 0.0                    # 0: 1.0 (deepseek2: rope_yarn_log_mul)

    # attention
    n_swa: int = 0
    swa_type: str = "none"                      # none, standard, chunked, symmetric
    swa_layers: tuple[bool, ...] = ()           # which layers look through the window
    f_attention_scale: float = 0.0              # 0: 1/sqrt(head size)
    f_max_alibi_bias: float = 0.0
    f_attn_logit_softcapping: float = 0.0
    f_final_logit_softcapping: float = 0.0
    f_clamp_kqv: float = 0.0
    indexer: Indexer | None = None              # how layers choose blocks of tokens to attend to
    f_attn_temp_scale: float = 0.0
    f_attn_temp_offset: float = 0.0
    n_attn_temp_floor_scale: int = 0

    # scales
    f_embedding_scale: float = 0.0
    f_residual_scale: float = 0.0
    f_logit_scale: float = 0.0

    # experts
    n_expert: int = 0
    n_expert_used: tuple[int, ...] = ()
    n_ff_exp: tuple[int, ...] = ()
    n_ff_shexp: int = 0
    n_expert_shared: int = 0
    n_expert_groups: int = 0
    n_group_used: int = 0
    n_layer_dense_lead: int = 0
    expert_weights_scale: float = 0.0
    expert_weights_norm: bool = False
    expert_gating_func: int = 0                 # 0: not given, 1: softmax, 2: sigmoid, 3: softmax of the chosen, 4: sqrt softplus

    # recurrent layers
    recurrent_layers: tuple[bool, ...] = ()     # which layers keep a state row instead of K and V
    kv_beside_state: bool = False               # or beside them
    n_embd_r: int = 0                           # elements of a row of the convolution's state
    n_embd_s: int = 0                           # and of the recurrence's
    ssm_d_conv: int = 0
    ssm_d_inner: int = 0
    ssm_d_state: int = 0
    ssm_dt_rank: int = 0
    ssm_n_group: int = 0

    ngrams: Ngrams | None = None                # how tokens and those before them name rows of a table
    ngram_layer: int = -1                       # the layer that reads it; it keeps a convolution's inputs in a row of its own
    n_embd_p: int = 0                           # elements of that row

    # --- derived ---

    @property
    def layers(self) -> range:
        """Layers that the graph runs."""
        return range(self.first_layer, self.n_layer)

    def nextn(self) -> HParams:
        """The same for a graph that runs the next-token-prediction block alone: it is of attention, without a window unless the
        file's own pattern gives it one."""
        n, rotated = self.n_layer, self.rope_layers
        return self.replace(first_layer=n, n_layer=n + 1, recurrent_layers=(), ngrams=None,
                            swa_layers=self.swa_layers and (*self.swa_layers[:n], *(self.swa_layers[n:n + 1] or (False,))),
                            rope_layers=rotated and (*rotated[:n], True))

    def n_ff_expert(self, il: int) -> int:
        """Length of one expert's feed-forward; where the file does not say, those used share the layer's."""
        return self.n_ff_exp[il] or self.n_ff[il] // max(self.n_expert_used[il], 1)

    def head_k(self, il: int) -> int:
        """Elements of a K head of layer `il`."""
        own = self.n_embd_head_k_swa
        return own if own and self.is_swa(il) else self.n_embd_head_k

    def head_v(self, il: int) -> int:
        own = self.n_embd_head_v_swa
        return own if own and self.is_swa(il) else self.n_embd_head_v

    def n_embd_k_gqa(self, il: int) -> int:
        """Elements of one K row of layer `il` in the cache."""
        return self.head_k(il) * self.n_head_kv[il]

    def n_embd_v_gqa(self, il: int) -> int:
        """The same of V; none where V is a part of K."""
        return 0 if self.is_mla else self.head_v(il) * self.n_head_kv[il]

    def is_swa(self, il: int) -> bool:
        return bool(self.swa_layers) and self.swa_layers[il]

    def has_rope(self, il: int) -> bool:
        return self.rope_layers[il] if self.rope_layers else self.rope_mode is not None

    @property
    def can_shift(self) -> bool:
        """K in the cache can follow when its position moves: by rotation, or because it does not depend on it."""
        if self.rope_mode is None:
            return self.f_max_alibi_bias > 0
        return not self.rope_mode & MULTI_AXIS and not self.k_norm_rotated

    @property
    def rope_offset(self) -> int:
        """The first rotated element of a K head; of latent attention the last elements are."""
        return self.n_embd_head_k - self.n_rot if self.n_lora_kv else 0

    def is_recurrent(self, il: int) -> bool:
        return any(self.recurrent_layers[il:il + 1])                # False of blocks behind the layers

    def has_kv(self, il: int) -> bool:
        """Layer `il` keeps K and V of the tokens that it has seen."""
        return (self.cache and self.n_head_kv[il] > 0 and (self.kv_beside_state or not self.is_recurrent(il))
                and self.kv_layer(il) == il)

    def kv_layer(self, il: int) -> int:
        """The layer whose K and V layer `il` reads: its own, or of the last layer of its kind that keeps some."""
        if not self.n_layer_kv or il < self.n_layer_kv:
            return il
        found = next((i for i in reversed(range(self.n_layer_kv)) if self.is_swa(i) == self.is_swa(il)), None)
        if found is None:
            raise ModelError(f"layer {il} of {self.arch} shares K and V of an earlier layer, and none is of its kind")
        return found

    @property
    def kq_scale(self) -> float:
        return self.f_attention_scale or self.n_embd_head_k ** -0.5

    def replace(self, **changes: Any) -> HParams:
        return dataclasses.replace(self, **changes)

    def recurrent(self, layers: Sequence[bool], **changes: Any) -> HParams:
        """The same with state rows in the given layers; their sizes are those of state spaces unless `changes` says otherwise."""
        n_conv = self.ssm_d_inner + 2 * self.ssm_n_group * self.ssm_d_state
        sizes = {"n_embd_r": max(self.ssm_d_conv - 1, 0) * n_conv, "n_embd_s": self.ssm_d_state * self.ssm_d_inner}
        return self.replace(recurrent_layers=tuple(map(bool, layers))[:self.n_layer], **sizes | changes)

    def recurrent_pattern(self, period: int) -> tuple[bool, ...]:
        """Which layers are recurrent: as the file says, else every layer but one in `period`."""
        if self.keys("attention.recurrent_layers", None) is not None:
            return self.keys.per_layer("attention.recurrent_layers", self.n_layer, convert=bool)
        n = int(self.keys.number("full_attention_interval", period))
        if n < 1:
            raise ModelError(f"{self.arch}.full_attention_interval is {n}")
        return tuple((il + 1) % n != 0 for il in range(self.n_layer))

    def layers_without_kv(self) -> tuple[bool, ...]:
        """Layers without KV heads, which in many hybrid models are the recurrent ones."""
        return tuple(n == 0 for n in self.n_head_kv[:self.n_layer])

    def window(self, n_swa: int, layers: Sequence[bool], swa_type: str = "standard") -> HParams:
        """The same with a sliding window over the given layers; no window at all if n_swa is 0.

        Unless an architecture has a rotated length of its own for them (`n_rot_swa`), that of the first layer is that of all.
        """
        if not n_swa:
            return self
        own = layers[0] and not self.n_rot_swa
        n_rot = int(self.keys.number("rope.dimension_count_swa", self.n_rot)) if own else self.n_rot
        return self.replace(n_swa=int(n_swa), swa_type=swa_type, swa_layers=tuple(map(bool, layers)), n_rot=n_rot)

    def swa_pattern(self, period: int, dense_first: bool = False) -> tuple[bool, ...]:
        """Which layers have the window: the file's own pattern (which may go on to the blocks behind the layers), else every
        layer but one in `period`."""
        given = self.keys("attention.sliding_window_pattern", period)
        if isinstance(given, np.ndarray | list | tuple):
            n_all = max(min(len(given), self.n_layer + self.n_layer_nextn), self.n_layer)
            return self.keys.per_layer("attention.sliding_window_pattern", n_all, convert=bool)
        n = int(given)
        return tuple(n == 0 or (il % n != 0 if dense_first else il % n < n - 1) for il in range(self.n_layer))

    @classmethod
    def read(cls, kv: Mapping[str, Any], *own: str, **changes: Any) -> HParams:
        """The keys that all architectures share, of those in `FEW_HAVE` the ones named, then `changes`."""
        arch = kv["general.architecture"]
        k = Keys(kv, arch)
        n_all, nextn = int(k.number("block_count")), int(k.number("nextn_predict_layers", 0))
        if not 0 < n_all <= 1024 or not 0 <= nextn < n_all:
            raise ModelError(f"{arch}.block_count is {n_all} (of them nextn_predict_layers: {nextn}), no number of layers "
                             "that a model can have: the file is damaged, or an override wrong")
        n_layer = n_all - nextn
        n_head = k.per_layer("attention.head_count", n_all, 0)
        fields: dict[str, Any] = dict(
            arch=arch, keys=k, n_vocab=_n_vocab(kv, k), n_ctx_train=int(k.number("context_length")),
            n_embd=int(k.number("embedding_length")), n_layer=n_layer, n_layer_nextn=nextn, n_head=n_head,
            n_head_kv=k.per_layer("attention.head_count_kv", n_all, n_head), n_ff=k.per_layer("feed_forward_length", n_all, 0),
            causal=bool(k.number("attention.causal", True)), pooling_type=int(k.number("pooling_type", -1)),
            n_cls_out=len(k("classifier.output_labels", ())) or 1,
            f_norm_eps=float(k.number("attention.layer_norm_epsilon", 0.0)),
            f_norm_rms_eps=float(k.number("attention.layer_norm_rms_epsilon", 0.0)))
        fields |= _heads(k, fields["n_embd"], max(n_head)) | _rope(k, fields["n_ctx_train"]) | _experts(k, n_all)
        fields["n_rot"] = int(k.number("rope.dimension_count", fields["n_embd_head_k"]))
        fields |= _ssm(k) | _latent(k, fields) | {FEW_HAVE[name]: float(k.number(name, 0.0)) for name in own} | changes
        return cls(**fields)


def _n_vocab(kv: Mapping[str, Any], k: Keys) -> int:
    tokens = kv.get("tokenizer.ggml.tokens")
    return len(tokens) if tokens is not None else int(k.number("vocab_size", 0))


def _heads(k: Keys, n_embd: int, n_head: int) -> dict[str, Any]:
    head = n_embd // n_head if n_head else 0
    return {"n_embd_head_k": int(k.number("attention.key_length", head)),
            "n_embd_head_v": int(k.number("attention.value_length", head))}


def _rope(k: Keys, n_ctx_train: int) -> dict[str, Any]:
    factor = float(k.number("rope.scaling.factor", 0.0) or k.number("rope.scale_linear", 0.0))
    base, scale = float(k.number("rope.freq_base", 10000.0)), 1.0 / factor if factor else 1.0
    return dict(rope_freq_base=base, rope_freq_scale=scale, rope_freq_base_swa=base, rope_freq_scale_swa=scale,
                rope_scaling=k("rope.scaling.type", "linear"), rope_attn_factor=float(k.number("rope.scaling.attn_factor", 1.0)),
                n_ctx_orig_yarn=int(k.number("rope.scaling.original_context_length", n_ctx_train)),
                rope_sections=_four(k, "rope.dimension_sections"))


def _four(k: Keys, name: str) -> tuple[int, ...]:
    """An array of at most four numbers; those that are missing are 0."""
    values = k(name, ())
    if isinstance(values, str) or len(values) > 4:
        raise ModelError(f"{k.arch}.{name} is {values!r}; it must be up to four numbers")
    return (*(int(x) for x in values), 0, 0, 0, 0)[:4]


def _experts(k: Keys, n_layer: int) -> dict[str, Any]:
    return dict(n_expert=int(k.number("expert_count", 0)), n_expert_used=k.per_layer("expert_used_count", n_layer, 0),
                n_ff_exp=k.per_layer("expert_feed_forward_length", n_layer, 0),
                n_ff_shexp=int(k.number("expert_shared_feed_forward_length", 0)),
                n_expert_shared=int(k.number("expert_shared_count", 0)),
                n_expert_groups=int(k.number("expert_group_count", 0)),
                n_group_used=int(k.number("expert_group_used_count", 0)),
                n_layer_dense_lead=int(k.number("leading_dense_block_count", 0)),
                expert_weights_scale=float(k.number("expert_weights_scale", 0.0)),
                expert_weights_norm=bool(k.number("expert_weights_norm", False)),
                expert_gating_func=int(k.number("expert_gating_func", 0)))


def _latent(k: Keys, heads: Mapping[str, Any]) -> dict[str, Any]:
    head_k, head_v = (int(k.number(f"attention.{name}_length_mla", 0)) for name in ("key", "value"))
    return dict(n_lora_q=int(k.number("attention.q_lora_rank", 0)), n_lora_kv=int(k.number("attention.kv_lora_rank", 0)),
                is_mla=bool(head_k and head_v), n_embd_head_k_mla=head_k or heads["n_embd_head_k"],
                n_embd_head_v_mla=head_v or heads["n_embd_head_v"])


def _ssm(k: Keys) -> dict[str, Any]:
    return dict(ssm_d_conv=int(k.number("ssm.conv_kernel", 0)), ssm_d_inner=int(k.number("ssm.inner_size", 0)),
                ssm_d_state=int(k.number("ssm.state_size", 0)), ssm_dt_rank=int(k.number("ssm.time_step_rank", 0)),
                ssm_n_group=int(k.number("ssm.group_count", 0)))
