"""What is changed in a spec to see whether a rule was read from its source or from that one spec.

In: the key/values of a spec. Out: `MUTATIONS`, each a name and a function from key/values to changed ones (None: says nothing about
this architecture), and `SCENES`, in which the unchanged spec is run. Keys stand without the architecture's name.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Keys = dict[str, Any]
Mutation = Callable[[Keys], Keys | None]
HEADS = "attention.head_count", "attention.head_count_kv"


@dataclass(frozen=True)
class Scene:
    """Prompts of so many tokens in one batch, then joint decodes."""
    lengths: tuple[int, ...] = (40,)
    n_ubatch: int = 16
    unified: bool = True
    n_decode: int = 3


PROMPT = Scene()
SCENES = {f"ubatch{n}": Scene(n_ubatch=n) for n in (1, 3, 17, 64)} | {
    "pair": Scene((33, 4)), "pair_streams": Scene((33, 4), unified=False),
    "four": Scene((20, 13, 9, 1)), "four_streams": Scene((20, 13, 9, 1), unified=False), "four_ubatch3": Scene((20, 13, 9, 1), 3)}


def put(**values: Any) -> Mutation:
    """Keys set to values, whether they are there or not; `__` in a name stands for a dot."""
    new = {name.replace("__", "."): value for name, value in values.items()}
    return lambda keys: {**keys, **new}


def change(**values: Any) -> Mutation:
    """The same where all of the keys are there."""
    new = {name.replace("__", "."): value for name, value in values.items()}
    return lambda keys: {**keys, **new} if all(name in keys for name in new) else None


def heads(n: int, n_kv: int, size: int = 0) -> Mutation:
    """So many heads, of `size` elements (0: as before), all of which rotate if all did."""
    def mutate(keys: Keys) -> Keys | None:
        if not any(_values(keys, HEADS[0])):
            return None
        new = {**keys, HEADS[0]: _where(keys[HEADS[0]], n), HEADS[1]: _where(keys[HEADS[1]], n_kv)}
        return _sized(new, size, size) if size else new
    return mutate


def sized(k: int, v: int) -> Mutation:
    return lambda keys: _sized(keys, k, v) if "attention.key_length_mla" not in keys else None


def _sized(keys: Keys, k: int, v: int) -> Keys | None:
    if "attention.key_length_mla" in keys:
        return None
    old, n_rot = keys["attention.key_length"], keys["rope.dimension_count"]
    new = {**keys, "attention.key_length": k, "attention.value_length": v,
        "rope.dimension_count": k if n_rot == old else min(n_rot, k)}
    if sections := keys.get("rope.dimension_sections"):
        new["rope.dimension_sections"] = [n * k // old for n in sections]
    return new


def layers(n: int) -> Mutation:
    """n layers; values per layer go on from the start."""
    def mutate(keys: Keys) -> Keys:
        old = keys["block_count"]
        return {name: [value[i % old] for i in range(n)] if _per_layer(name, value, old) else value
                for name, value in keys.items()} | {"block_count": n}
    return mutate


def _per_layer(name: str, value: Any, n_layer: int) -> bool:
    return isinstance(value, list) and len(value) == n_layer and "sections" not in name and not name.startswith("ple.")


def experts(n: int, used: int, **more: Any) -> Mutation:
    def mutate(keys: Keys) -> Keys | None:
        if "expert_count" not in keys:
            return None
        new = {name.replace("__", "."): value for name, value in more.items()}
        per_group = {"experts_per_group": 2} if "experts_per_group" in keys else {}
        return {**keys, "expert_count": n, "expert_used_count": used, **per_group, **new}
    return mutate


def half_rotated(keys: Keys) -> Keys | None:
    if "kv_lora_rank" in "".join(keys):
        return None
    new = {**keys, "rope.dimension_count": keys["rope.dimension_count"] // 2}
    if sections := keys.get("rope.dimension_sections"):
        new["rope.dimension_sections"] = [n // 2 for n in sections]
    return new


def window(n: int, pattern: Any = None) -> Mutation:
    def mutate(keys: Keys) -> Keys | None:
        new = {**keys, "attention.sliding_window": n}
        return new if pattern is None else {**new, "block_count": keys["block_count"], "attention.sliding_window_pattern": pattern}
    return mutate


def dense_lead(n: int | None) -> Mutation:
    """n leading dense layers; None: all of them."""
    def mutate(keys: Keys) -> Keys | None:
        if "expert_count" not in keys:
            return None
        return {**keys, "leading_dense_block_count": keys["block_count"] if n is None else n}
    return mutate


def value_heads(n: int, n_group: int) -> Mutation:
    """State spaces and delta nets with n heads in n_group groups (delta nets: key heads)."""
    def mutate(keys: Keys) -> Keys | None:
        if "ssm.group_count" not in keys:
            return None
        size = keys["ssm.inner_size"] // max(keys["ssm.time_step_rank"], 1)
        return {**keys, "ssm.time_step_rank": n, "ssm.group_count": n_group, "ssm.inner_size": n * size}
    return mutate


def without(*names: str) -> Mutation:
    return lambda keys: {k: v for k, v in keys.items() if k not in names} if any(n in keys for n in names) else None


def then(*mutations: Mutation) -> Mutation:
    def mutate(keys: Keys) -> Keys | None:
        new: Keys | None = keys
        for m in mutations:
            new = None if new is None else m(new)
        return new
    return mutate


def _values(keys: Keys, name: str) -> list[Any]:
    value = keys.get(name, 0)
    return value if isinstance(value, list) else [value]


def _where(value: Any, n: int) -> Any:
    """n where there was something."""
    return [n if v else v for v in value] if isinstance(value, list) else (n if value else value)


# Architectures that have no golden spec. A key that begins with / is whole; a name in `LACKING` is of a tensor that llama.cpp would
# read and that such files have not.
LACKING = {"rwkv6qwen2": ["time_mix_first.weight"]}
BASE: Keys = {"vocab_size": 128, "context_length": 256, "embedding_length": 128, "block_count": 2, "feed_forward_length": 192,
              "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 32, "attention.value_length": 32,
              "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": 32, "rope.freq_base": 10000.0}
# What random weights are multiplied with. Where attention does not divide by the head size, random queries would make it so sharp
# that the rounding of llama.cpp's GELU, which comes from a table of F16, grows from layer to layer.
FACTORS = {"gemma4": {"attn_q_norm": 0.15, "ffn_gate_inp": 4.0}, "gemma3n": {"attn_q_norm": 0.15, "post_": 0.3}}
NEW: dict[str, Keys] = {
    "apertus": {f"/xielu.{name}": values for name, values in
                {"alpha_n": [0.8, 0.5], "alpha_p": [0.6, 0.9], "beta": [0.5, 0.4], "eps": [-1e-6, -0.1]}.items()},
    "bitnet": {}, "chameleon": {"vocab_size": 8224, "embedding_length": 64, "attention.head_count": 2, "feed_forward_length": 96},
    "plm": {"attention.head_count_kv": 4, "attention.kv_lora_rank": 64, "attention.key_length": 48, "rope.dimension_count": 16},
    "deepseek2-ocr": {"attention.head_count_kv": 4, "expert_count": 8, "expert_used_count": 3, "expert_shared_count": 2,
                      "expert_feed_forward_length": 64, "leading_dense_block_count": 1, "expert_weights_scale": 1.5},
    "gemma3n": {"embedding_length": 64, "feed_forward_length": 96, "block_count": 25, "attention.head_count": 4,
                "attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 16,
                "attention.sliding_window": 8},
    "gemma4": {"block_count": 5, "attention.shared_kv_layers": 2, "attention.sliding_window": 8,
               "attention.sliding_window_pattern": [True, True, False, True, False], "attention.key_length": 32,
               "attention.value_length": 32, "attention.key_length_swa": 16, "attention.value_length_swa": 16,
               "rope.dimension_count": 32, "rope.dimension_count_swa": 16, "embedding_length_per_layer_input": 16,
               "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64},
    "rwkv6": {"attention.head_count": 0, "attention.head_count_kv": 0, "attention.layer_norm_epsilon": 1e-5, "wkv.head_size": 64,
              "time_mix_extra_dim": 32, "time_decay_extra_dim": 24},
    "rwkv7": {"attention.head_count": 0, "attention.head_count_kv": 0, "attention.layer_norm_epsilon": 1e-5, "wkv.head_size": 64,
              "attention.decay_lora_rank": 16, "attention.iclr_lora_rank": 24, "attention.value_residual_mix_lora_rank": 20,
              "attention.gate_lora_rank": 28},
    "rwkv6qwen2": {"attention.head_count": 0, "wkv.head_size": 32, "time_mix_extra_dim": 16, "time_decay_extra_dim": 24,
                   "token_shift_count": 1},
    "arwkv7": {"attention.head_count": 0, "wkv.head_size": 64, "token_shift_count": 1,
               "attention.decay_lora_rank": 16, "attention.iclr_lora_rank": 24,
               "attention.value_residual_mix_lora_rank": 20, "attention.gate_lora_rank": 28}}

# llama.cpp rules out image tokens in the first row of a batch alone; we do in all.
COMPARED = {"chameleon": slice(8196, None)}
# Where llama.cpp is not to be followed: patterns of spec and mutation, and why. It loads scales of all models and applies them in
# `SCALED`.
SCALED = ("bitnet|cohere2(moe)?|hy_v3|llama|mamba2?|mellum|mistral3|nanbeige|nemotron_h(_moe)?|qwen3(moe)?|qwen35(moe)?|"
          "qwen4exp|refact-moe")
REASONS: list[tuple[str, str, str]] = [
    (f"(?!({SCALED})(-|$)).*", "scales", "llama.cpp loads scales of matrices and does not apply them"),
    ("plamo2-dense", "pair.*|four.*", "llama.cpp mixes the tokens of several sequences"),
    ("rwkv6qwen2|arwkv7", "pair.*|four.*", "llama.cpp mixes the tokens of several sequences"),
    ("bailingmoe2-moe", "k96_v96|heads.*|k.*_v.*", "llama.cpp gives the fused matrix n_embd rows for Q, whatever the heads are"),
    ("qwen2vl-dense", "eps", "llama.cpp does not read the epsilon"),
    ("hy_v3-moe|kimi-linear-moe", "no ffn_gate_shexp.*ffn_up_shexp.*|no ffn_down_shexp.*|no ffn_up_shexp.*",
     "llama.cpp adds the activation of a shared expert that is not there"),
    ("glm4moe-moe", "shared0", "llama.cpp adds the activation of a shared expert that is not there"),
    ("(grok|muse-glimmer|talkie)-.*", "logit_scale0", "llama.cpp makes all logits 0"),
    (".*", "window0", "llama.cpp masks every token with a window of 0"),
    ("deepseek2-ocr", "rope_.*|yarn.*", "llama.cpp scales the products, but not the rotation")]

YARN: Keys = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 64}
YARN_MORE: Keys = {f"rope__scaling__yarn_{name}": value for name, value in
                   {"beta_fast": 16.0, "beta_slow": 2.0, "ext_factor": 0.7, "attn_factor": 1.2}.items()}
GROUPS: Keys = {"expert_group_count": 4, "expert_group_used_count": 2}

# These are also run with quantized weights.
SHAPES: dict[str, Mutation] = {
    "same": put(), "heads4_kv2": heads(4, 2), "heads4_kv1": heads(4, 1), "heads4_kv2_of_64": heads(4, 2, 64),
    "heads6_kv3": heads(6, 3), "layers3": layers(3), "experts8_used3": experts(8, 3), "experts8_used1": experts(8, 1),
    "experts8_used8": experts(8, 8), "groups": experts(8, 3, **GROUPS), "value_heads": value_heads(4, 2),
    "heads4_kv2_layers3_experts8": then(heads(4, 2), layers(3), experts(8, 3))}
MUTATIONS: dict[str, Mutation] = SHAPES | {
    # heads, layers, widths
    "heads3_kv3": heads(3, 3), "heads8_kv4_of_32": heads(8, 4, 32), "k128_v64": sized(128, 64), "k64_v128": sized(64, 128),
    "k96_v96": sized(96, 96), "layers1": layers(1), "layers5": layers(5), "layers8": layers(8),
    "embd192": change(embedding_length=192), "ff160": change(feed_forward_length=160),
    "no_experts": without("expert_count", "expert_used_count", "expert_feed_forward_length"), "shared_kv0": change(
        attention__shared_kv_layers=0), "per_layer0": change(embedding_length_per_layer_input=0),
    "ff_exp96": change(expert_feed_forward_length=96), "ff_shexp96": change(expert_shared_feed_forward_length=96),
    # experts
    "experts6_used4": experts(6, 4), "shared0": change(expert_shared_count=0), "shared2": change(expert_shared_count=2),
    "groups_of_4": experts(8, 2, expert_group_count=2, expert_group_used_count=1),
    "weights_scale": experts(8, 3, expert_weights_scale=2.5), "norm_w": experts(8, 3, expert_weights_norm=True),
    "no_norm_w": experts(8, 3, expert_weights_norm=False),
    **{f"gating{i}": experts(8, 3, expert_gating_func=i, expert_weights_norm=True) for i in (1, 2, 3, 4)},
    "moe_step1": change(interleave_moe_layer_step=1), "lead0": dense_lead(0), "lead1": dense_lead(1), "lead_all": dense_lead(None),
    "lead1_layers3": then(layers(3), dense_lead(1)),
    "group_scale": change(expert_group_scale=0.5), "latent64": put(moe_latent_size=64),
    "clamp_exp": put(swiglu_clamp_exp=2.0, swiglu_clamp_shexp=1.0),
    "clamps": then(layers(3), put(swiglu_clamp_exp=[0.0, 1.0, 2.0], swiglu_clamp_shexp=[0.5, 0.0, 1.0])),
    # rotation
    "rope_half": half_rotated, "rope_base": put(rope__freq_base=500000.0), "rope_linear": put(rope__scaling__factor=4.0),
    "rope_old_key": put(rope__scale_linear=4.0), "yarn": put(**YARN), "yarn_attn": put(**YARN, rope__scaling__attn_factor=1.3),
    "yarn_log_mul": put(**YARN, rope__scaling__yarn_log_multiplier=0.1), "yarn_beta": put(**YARN, **YARN_MORE),
    "rope_none": put(rope__scaling__type="none", rope__scaling__factor=4.0),
    "longrope": put(rope__scaling__type="longrope", rope__scaling__original_context_length=64),
    "longrope_short": put(rope__scaling__type="longrope", rope__scaling__original_context_length=512),
    "rope_alpha": put(rope__scaling__alpha=1000.0), "rope_swa": put(rope__freq_base_swa=5000.0),
    "rope_dims_swa": put(rope__dimension_count_swa=32), "context32": put(context_length=32),
    "head_swa": put(attention__key_length_swa=64, attention__value_length_swa=64, rope__dimension_count_swa=64),
    # windows
    **{f"window{n}": window(n) for n in (0, 1, 2, 8, 512)}, "window8_layers8": then(layers(8), window(8)),
    "window8_of_2": then(layers(5), window(8, 2)), "window8_of_3": then(layers(5), window(8, 3)),
    "window8_given": then(layers(5), window(8, [1, 0, 0, 1, 1])),
    # scales, caps, norms; keys that an architecture does not read are ignored
    "logit_scale": put(logit_scale=0.3), "logit_scale0": change(logit_scale=0.0),
    "soft_caps": put(attn_logit_softcapping=3.0, final_logit_softcapping=2.0, router_logit_softcapping=1.5),
    "attn_scale": put(attention__scale=0.05), "embedding_scale": put(embedding_scale=3.0),
    "residual_scale": put(residual_scale=0.7),
    "clamp": put(attention__clamp_kqv=0.3), "alibi": put(attention__max_alibi_bias=4.0),
    "attn_output_scale": put(attention__output_scale=0.5), "value_scale": put(attention__value_scale=0.6),
    "temperature": put(attention__temperature_scale=0.2, attention__temperature_length=8),
    "causal_off": put(attention__causal=False), "parallel": put(use_parallel_residual=True), "deepstack": put(n_deepstack_layers=1),
    "eps": put(attention__layer_norm_epsilon=0.02, attention__layer_norm_rms_epsilon=0.01),
    "eps_group": put(attention__group_norm_epsilon=0.02),
    # recurrent layers and latent attention
    "value_heads1": value_heads(1, 1), "value_heads4_of_1": value_heads(4, 1), "value_heads4_of_4": value_heads(4, 4),
    "conv3": change(ssm__conv_kernel=3), "state64": change(ssm__state_size=64), "conv_cache4": change(shortconv__l_cache=4),
    "dt_bcrms": put(ssm__dt_b_c_rms=True), "no_q_lora": without("attention.q_lora_rank"),
    "full_interval2": then(layers(5), without("attention.recurrent_layers"), put(full_attention_interval=2))}
