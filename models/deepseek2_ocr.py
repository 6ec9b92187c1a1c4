"""deepseek2-ocr: the text part of DeepSeek OCR; deepseek with more keys for its experts, and a rotation that is never scaled."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggraph.build.moe import SOFTMAX
from ggraph.hparams import HParams
from ggraph.ops import NEOX

from .deepseek import graph, weights

__all__ = ["graph", "hparams", "weights"]


def hparams(kv: Mapping[str, Any]) -> HParams:
    hp = HParams.read(kv, rope_mode=NEOX, rope_freq_base=10000.0, rope_scaling="none", rope_attn_factor=1.0)
    return hp.replace(n_rot=hp.n_embd_head_k, expert_gating_func=hp.expert_gating_func or SOFTMAX)
