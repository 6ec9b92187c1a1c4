"""A whole llama model in 200 KB: random weights, a SentencePiece vocabulary of letters and bytes, a chat template.

It writes nonsense, but its tokenizer, its arithmetic and its end of text are those of a real one.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf

from tests import spec

N_EMBD, N_HEAD, N_HEAD_KV, HEAD, N_FF, N_LAYER, N_CTX = 64, 2, 1, 32, 96, 2, 512
CONTROL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
WORDS = ["▁", *"etaoinshrldcumwfgypbvk.,\n", "er", "th", "in", "an", "on", "▁the", "▁a", "▁in"]
TEMPLATE = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
TOKENS = ["<unk>", *CONTROL, *(f"<0x{i:02X}>" for i in range(256)), *WORDS]
N_VOCAB, BOS, EOS = len(TOKENS), 1, 2


def tiny(**kv: Any) -> spec.Spec:
    """`kv` replaces keys, "." written "__": `tiny(general__architecture="nonesuch", llama__context_length=256)`."""
    kind = gguf.TokenType
    types = [kind.UNKNOWN, *[kind.CONTROL] * len(CONTROL), *[kind.BYTE] * 256, *[kind.NORMAL] * len(WORDS)]
    keys: dict[str, Any] = {
        "context_length": N_CTX, "embedding_length": N_EMBD, "block_count": N_LAYER, "feed_forward_length": N_FF,
        "attention.head_count": N_HEAD, "attention.head_count_kv": N_HEAD_KV, "attention.key_length": HEAD,
        "attention.value_length": HEAD, "rope.dimension_count": HEAD, "attention.layer_norm_rms_epsilon": 1e-5}
    keys = {f"llama.{name}": value for name, value in keys.items()} | {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": TOKENS, "tokenizer.chat_template": TEMPLATE,
        "tokenizer.ggml.scores": [-float(i) for i in range(N_VOCAB)], "tokenizer.ggml.token_type": [int(t) for t in types],
        "tokenizer.ggml.bos_token_id": BOS, "tokenizer.ggml.eos_token_id": EOS}
    keys |= {name.replace("__", "."): value for name, value in kv.items()}
    return {"arch": keys.pop("general.architecture", "llama"), "tensors": tensors(),
            "kv": [[name, _kind(value), value] for name, value in keys.items() if value is not None]}


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return f"ARRAY:{_kind(value[0]).replace('UINT', 'INT')}"
    return {str: "STRING", bool: "BOOL", int: "UINT32", float: "FLOAT32"}[type(value)]


def tensors() -> list[list[Any]]:
    q, kv = N_HEAD * HEAD, N_HEAD_KV * HEAD
    layer = {"attn_norm": [N_EMBD], "attn_q": [N_EMBD, q], "attn_k": [N_EMBD, kv], "attn_v": [N_EMBD, kv],
             "attn_output": [q, N_EMBD], "ffn_norm": [N_EMBD], "ffn_gate": [N_EMBD, N_FF], "ffn_up": [N_EMBD, N_FF],
             "ffn_down": [N_FF, N_EMBD]}
    rows = {f"blk.{il}.{name}": shape for il in range(N_LAYER) for name, shape in layer.items()}
    rows |= {"token_embd": [N_EMBD, N_VOCAB], "output_norm": [N_EMBD], "output": [N_EMBD, N_VOCAB]}
    return [[f"{name}.weight", shape, "F32"] for name, shape in rows.items()]


def write(path: Path, **kv: Any) -> Path:
    return spec.write(tiny(**kv), path)


def write_hybrid(path: Path) -> Path:
    """A model of recurrent and attention layers with the same vocabulary."""
    base, own = spec.specs()["qwen35-dense"], tiny()
    kv = [row for row in base["kv"] if not row[0].startswith("tokenizer.") and row[0] != "qwen35.vocab_size"]
    kv += [row for row in own["kv"] if row[0].startswith("tokenizer.")]
    wide = {"token_embd.weight", "output.weight"}
    tensors = [[name, [shape[0], N_VOCAB] if name in wide else shape, kind] for name, shape, kind in base["tensors"]]
    return spec.write({"arch": base["arch"], "kv": kv, "tensors": tensors}, path)
