"""Context parameters: what one Context was asked for, resolved against its model's hyperparameters.

In: the arguments of `Context` and `HParams`. Out: `CParams`, frozen; graphs and memory read it. Names are llama.cpp's.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .dtypes import DType
from .errors import Error, named, numbers
from .hparams import HParams

POOLING = ("none", "mean", "cls", "last", "rank")        # llama.cpp's enum order


@dataclass(frozen=True)
class Rope:
    """Rotation parameters after YaRN's rules, as `ops.rope` takes them."""
    freq_base: float
    freq_scale: float
    ext_factor: float
    attn_factor: float
    beta_fast: float
    beta_slow: float
    n_ctx_orig: int


@dataclass(frozen=True)
class CParams:
    n_ctx: int
    n_ctx_seq: int                  # cells that one sequence may use
    n_batch: int
    n_ubatch: int
    n_seq_max: int
    n_threads: int
    n_threads_batch: int
    kv_unified: bool
    flash_attn: bool
    causal: bool
    embeddings: bool
    pooling: str
    type_k: DType
    type_v: DType
    swa_full: bool
    n_rollback: int                 # tokens that a recurrent state can go back
    mtp: bool                       # the graph is that of the block for next-token prediction
    encoder: bool                   # or that of the encoder of a model that has one beside its decoder
    hidden: bool                    # hidden states of all tokens are results, beside the logits
    rope: Rope

    def chooses_blocks(self, hp: HParams, il: int) -> bool:
        """Layer `il` may have to leave blocks out. As in llama.cpp each head's own choice needs flash attention."""
        x = hp.indexer
        return x is not None and any(x.layers[il:il + 1]) and (self.flash_attn or x.means) and self.n_ctx_seq > x.reach

    @property
    def graph(self) -> str:
        """The function of the architecture that builds the graph."""
        return "nextn_graph" if self.mtp else "encoder_graph" if self.encoder else "graph"

    def of_encoder(self) -> dict[str, Any]:
        """Arguments of a Context for the encoder beside this one's decoder."""
        return {"n_ctx": self.n_ctx, "n_batch": self.n_ctx, "n_seq_max": self.n_seq_max, "n_threads": self.n_threads,
                "n_threads_batch": self.n_threads_batch, "flash_attn": self.flash_attn, "pooling": "none"}

    @property
    def n_stream(self) -> int:
        return 1 if self.kv_unified else self.n_seq_max


ROPE_SCALING = ("none", "linear", "yarn", "longrope")
ROPE_OPTIONS = ("scaling", "scale", "freq_base", "freq_scale", "yarn_orig_ctx", "yarn_ext_factor", "yarn_attn_factor",
                "yarn_beta_slow", "yarn_beta_fast")


def resolve_rope(hp: HParams, options: Mapping[str, Any] | None) -> Rope:
    """YaRN's rules as llama.cpp applies them; `options` are the --rope-* and --yarn-* values that were given.

    Negative or missing values mean: as the file says. The attention factor is divided by the one that the rope op itself
    applies where YaRN is on, so that the file's meaning stays.
    """
    o = {name: value for name, value in named("rope", options).items() if value is not None}
    if unknown := set(o) - set(ROPE_OPTIONS):
        raise Error(f"unknown rope option {sorted(unknown)[0]!r}; known ones: {', '.join(ROPE_OPTIONS)}")
    numbers(**{f"rope option {name}": value for name, value in o.items() if name != "scaling"})
    if o.get("scaling") not in (None, *ROPE_SCALING):
        raise Error(f"rope option scaling is {o['scaling']!r}; it must be one of {', '.join(ROPE_SCALING)}")
    scaling = o.get("scaling") or hp.rope_scaling
    freq_scale = 1.0 / o["scale"] if o.get("scale") else o.get("freq_scale") or hp.rope_freq_scale
    if scaling == "none":
        freq_scale = 1.0

    def given(name: str, default: float) -> float:
        return float(o[name]) if o.get(name, -1) >= 0 else default

    ext = given("yarn_ext_factor", hp.yarn_ext_factor)
    if ext < 0:
        ext = 1.0 if scaling == "yarn" else 0.0
    attn = given("yarn_attn_factor", hp.yarn_attn_factor)
    if ext:
        factor = 1.0 / freq_scale
        m = hp.rope_yarn_log_mul
        attn = _mscale(factor, 1.0) if not m else _mscale(factor, hp.yarn_mscale or 1.0) / _mscale(factor, m)
        attn /= 1.0 + 0.1 * math.log(factor)
    return Rope(o.get("freq_base") or hp.rope_freq_base, freq_scale, ext, attn * hp.rope_attn_factor,
                given("yarn_beta_fast", hp.yarn_beta_fast), given("yarn_beta_slow", hp.yarn_beta_slow),
                int(o.get("yarn_orig_ctx") or hp.n_ctx_orig_yarn or hp.n_ctx_train))


def _mscale(scale: float, mscale: float) -> float:
    return 1.0 if scale <= 1.0 else 0.1 * mscale * math.log(scale) + 1.0
