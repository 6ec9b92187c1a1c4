"""Specs of tiny random encoders, one or two per architecture, and the cases that bench/make_goldens.py lets llama.cpp answer.

Key/values and tensor tables as `spec.write` takes them. A case is (spec, pooling); the batch is two sequences, 11 and 7 tokens.
"""
from __future__ import annotations

from typing import Any

from tests.spec import Spec

N_VOCAB, N_CTX, N_EMBD, N_HEAD, N_LAYER, N_FF = 128, 64, 64, 4, 3, 96
HEAD = N_EMBD // N_HEAD
LENGTHS = (11, 7)                       # tokens of each sequence of the batch
POOLINGS = ("none", "mean", "cls", "last")
KIND = {str: "STRING", bool: "BOOL", int: "UINT32", float: "FLOAT32"}
Shapes = dict[str, list[int]]


def spec(arch: str, tensors: Shapes, layer: Shapes | list[Shapes], **keys: Any) -> Spec:
    """`layer`: the tensors of every layer, or of each."""
    layers = layer if isinstance(layer, list) else [layer] * N_LAYER
    common = {"context_length": N_CTX, "embedding_length": N_EMBD, "block_count": len(layers), "feed_forward_length": N_FF,
              "attention.head_count": N_HEAD, "attention.head_count_kv": N_HEAD, "attention.causal": False, "vocab_size": N_VOCAB,
              "pooling_type": 1}
    rows = {f"{arch}.{name.replace('__', '.')}": value for name, value in (common | keys).items()}
    kv: list[list[Any]] = [[name, KIND[type(value)], value] for name, value in rows.items()]
    kv += [["tokenizer.ggml.model", "STRING", "test"], ["tokenizer.ggml.token_type_count", "UINT32", 2],
           ["tokenizer.ggml.tokens", "ARRAY:STRING", [f"tok_{i}" for i in range(N_VOCAB)]],
           ["tokenizer.ggml.scores", "ARRAY:FLOAT32", [0.0] * N_VOCAB]]
    prefix = "enc." if arch == "t5encoder" else ""
    every = {f"{prefix}blk.{il}.{name}": shape for il, shapes in enumerate(layers) for name, shape in shapes.items()}
    return {"arch": arch, "kv": kv, "tensors": [[name, shape, "F32"] for name, shape in (tensors | every).items()]}


def vectors(*names: str, n: int = N_EMBD, bias: bool = False) -> Shapes:
    return {f"{name}.{part}": [n] for name in names for part in (("weight", "bias") if bias else ("weight",))}


def matrix(name: str, *ne: int, bias: bool = False) -> Shapes:
    return {f"{name}.weight": list(ne)} | ({f"{name}.bias": list(ne[1:])} if bias else {})


def qkv(bias: bool = False, n_kv: int = N_EMBD) -> Shapes:
    return (matrix("attn_q", N_EMBD, N_EMBD, bias=bias) | matrix("attn_k", N_EMBD, n_kv, bias=bias)
            | matrix("attn_v", N_EMBD, n_kv, bias=bias))


def ffn(*, up: int = N_FF, gate: bool = False, bias: bool = False) -> Shapes:
    return (matrix("ffn_up", N_EMBD, up, bias=bias) | matrix("ffn_down", N_FF, N_EMBD, bias=bias)
            | (matrix("ffn_gate", N_EMBD, N_FF) if gate else {}))


LN, RMS = {"attention__layer_norm_epsilon": 1e-6}, {"attention__layer_norm_rms_epsilon": 1e-6}
TOKENS = matrix("token_embd", N_EMBD, N_VOCAB)
BERT = TOKENS | matrix("token_types", N_EMBD, 2) | vectors("token_embd_norm", bias=True)
CLASSIFIER = matrix("cls", N_EMBD, N_EMBD, bias=True) | matrix("cls.output", N_EMBD, 1, bias=True)
POST = vectors("attn_output_norm", "layer_output_norm", bias=True)
PLAIN_OUT, OUT = matrix("attn_output", N_EMBD, N_EMBD), matrix("attn_output", N_EMBD, N_EMBD, bias=True)
PRE = vectors("attn_norm", "ffn_norm") | PLAIN_OUT
EXPERTS = (matrix("ffn_gate_inp", N_EMBD, 4) | matrix("ffn_up_exps", N_EMBD, N_FF, 4) | matrix("ffn_down_exps", N_FF, N_EMBD, 4))
FUSED = matrix("attn_qkv", N_EMBD, 3 * N_EMBD)
GEMMA = (vectors("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm") | vectors("attn_q_norm", "attn_k_norm", n=HEAD)
         | qkv(n_kv=HEAD) | PLAIN_OUT | ffn(gate=True))
JINA = qkv(bias=True) | OUT | POST
MODERN = vectors("attn_norm", "ffn_norm") | FUSED | PLAIN_OUT | ffn(up=2 * N_FF)


T5 = TOKENS | vectors("enc.output_norm")


def t5_layer(head: int, gate: bool = False) -> Shapes:
    n = N_HEAD * head
    return (vectors("attn_norm", "ffn_norm") | matrix("attn_q", N_EMBD, n) | matrix("attn_k", N_EMBD, n)
            | matrix("attn_v", N_EMBD, n) | matrix("attn_o", n, N_EMBD) | ffn(gate=gate))


def _first_without_norm(shapes: Shapes, n: int) -> list[Shapes]:
    return [{k: v for k, v in shapes.items() if k != "attn_norm.weight"}] + [shapes] * (n - 1)


SPECS: dict[str, Spec] = {
    "bert": spec("bert", BERT | CLASSIFIER | matrix("position_embd", N_EMBD, N_CTX), qkv(True) | OUT | POST | ffn(bias=True), **LN),
    "bert-b": spec("bert", BERT | matrix("position_embd", N_EMBD, N_CTX), FUSED | PLAIN_OUT | POST | ffn(), **LN),
    "nomic-bert": spec("nomic-bert", BERT, FUSED | PLAIN_OUT | POST | ffn(gate=True), rope__freq_base=1000.0, **LN),
    "nomic-bert-moe": spec("nomic-bert-moe", BERT, [
        {**matrix("attn_qkv", N_EMBD, 3 * N_EMBD, bias=True), **OUT, **POST, **(EXPERTS if il % 2 else ffn(bias=True))}
        for il in range(4)], moe_every_n_layers=2, expert_count=4, expert_used_count=2, **LN),
    "jina-bert-v3": spec("jina-bert-v3", BERT, matrix("attn_qkv", N_EMBD, 3 * N_EMBD, bias=True) | OUT | POST | ffn(bias=True),
                         rope__freq_base=20000.0, **LN),
    "jina-bert-v2": spec("jina-bert-v2", BERT, JINA | matrix("ffn_up", N_EMBD, N_FF) | matrix("ffn_gate", N_EMBD, N_FF)
                         | matrix("ffn_down", N_FF, N_EMBD, bias=True), **LN),
    "jina-bert-v2-b": spec("jina-bert-v2", BERT, JINA | vectors("attn_q_norm", "attn_k_norm", "attn_norm_2", bias=True)
                           | matrix("ffn_up", N_EMBD, 2 * N_FF) | matrix("ffn_down", N_FF, N_EMBD, bias=True), **LN),
    "modern-bert": spec("modern-bert", TOKENS | vectors("token_embd_norm", "output_norm", "cls.norm")
                        | matrix("cls", N_EMBD, N_EMBD) | matrix("cls.output", N_EMBD, 1, bias=True),
                        _first_without_norm(MODERN, 4), attention__sliding_window=4, rope__freq_base=160000.0,
                        rope__freq_base_swa=10000.0, **LN),
    "modern-bert-b": spec("modern-bert", TOKENS | vectors("token_embd_norm", "output_norm"), MODERN,
                          hidden_activation="silu", **LN),
    "eurobert": spec("eurobert", TOKENS | vectors("output_norm"), PRE | qkv(n_kv=2 * HEAD) | ffn(gate=True),
                     **RMS | {"attention.head_count_kv": 2}),
    "llama-embed": spec("llama-embed", TOKENS | vectors("output_norm"), PRE | qkv(n_kv=2 * HEAD) | ffn(gate=True),
                        **RMS | {"attention.head_count_kv": 2}),
    "neo-bert": spec("neo-bert", TOKENS | vectors("enc.output_norm") | CLASSIFIER, PRE | FUSED | ffn(up=2 * N_FF), **RMS),
    "t5encoder": spec("t5encoder", T5, [t5_layer(HEAD, gate=True) | matrix("attn_rel_b", N_HEAD, 32), t5_layer(HEAD, gate=True)],
                      attention__relative_buckets_count=32, **RMS),
    "t5encoder-b": spec("t5encoder", T5, [t5_layer(24) | matrix("attn_rel_b", N_HEAD, 8)] * 2,
                        attention__relative_buckets_count=8, attention__key_length=24, attention__value_length=24, **RMS),
    "gemma-embedding": spec("gemma-embedding", TOKENS | vectors("output_norm") | matrix("dense_2", N_EMBD, 80)
                            | matrix("dense_3", 80, N_EMBD), [GEMMA] * 7, attention__sliding_window=4, dense_2_feat_in=N_EMBD,
                            dense_2_feat_out=80, dense_3_feat_in=80, dense_3_feat_out=N_EMBD,
                            **RMS | {"attention.head_count_kv": 1}),
    "gemma-embedding-b": spec("gemma-embedding", TOKENS | vectors("output_norm"), [GEMMA] * 6, attention__sliding_window=512,
                              rope__freq_base=1000000.0, rope__freq_base_swa=10000.0, **RMS | {"attention.head_count_kv": 1}),
}
RANKING = ("bert", "modern-bert", "neo-bert")               # those with a classifier


def cases() -> list[tuple[str, str]]:
    return [(name, pooling) for name in SPECS for pooling in (*POOLINGS, *(("rank",) if name in RANKING else ()))]


def batch() -> list[tuple[int, int, int]]:
    """(token, position, sequence) of every row."""
    lengths = [(s, p) for s, n in enumerate(LENGTHS) for p in range(n)]
    return [((17 * s + 29 * p + 5) % N_VOCAB, p, s) for s, p in lengths]
