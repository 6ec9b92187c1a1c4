"""Specs of tiny random models of an encoder and a decoder, and the batches that bench/make_goldens.py lets llama.cpp answer."""
from __future__ import annotations

from typing import Any

from tests.encoders import HEAD, N_EMBD, N_HEAD, N_VOCAB, RMS, Shapes, matrix, spec, t5_layer, vectors
from tests.spec import Spec

Rows = list[tuple[int, int, int]]       # token, position, sequence

TEXTS = (13, 9)                         # tokens of each sequence's text
BATCHES = ((6, 4), (1, 1), (1, 1))      # tokens of each sequence of the decoder's batches
N_CTX = 256


def _spec(head: int, n_layer: int, n_decoder: int, buckets: int, gate: bool, tied: bool, bias_in: range, **keys: Any) -> Spec:
    """`bias_in`: layers with a bias of distances of their own."""
    n = N_HEAD * head
    cross: Shapes = (vectors("cross_attn_norm") | matrix("cross_attn_q", N_EMBD, n) | matrix("cross_attn_k", N_EMBD, n)
                     | matrix("cross_attn_v", N_EMBD, n) | matrix("cross_attn_o", n, N_EMBD))
    bias = matrix("attn_rel_b", N_HEAD, buckets)
    whole = (matrix("token_embd", N_EMBD, N_VOCAB) | vectors("enc.output_norm", "dec.output_norm")
             | ({} if tied else matrix("output", N_EMBD, N_VOCAB)))
    for part, count in (("enc", n_layer), ("dec", n_decoder)):
        for il in range(count):
            shapes = t5_layer(head, gate) | (bias if il in bias_in else {}) | (cross if part == "dec" else {})
            whole |= {f"{part}.blk.{il}.{name}": shape for name, shape in shapes.items()}
    keys |= {"attention__key_length": head, "attention__value_length": head, "attention__relative_buckets_count": buckets}
    return spec("t5", whole, [{}] * n_layer, decoder_block_count=n_decoder, decoder_start_token_id=3, pooling_type=0,
                attention__causal=True, **RMS | keys)


SPECS: dict[str, Spec] = {
    "t5": _spec(HEAD, 3, 3, 32, gate=True, tied=True, bias_in=range(1)),
    "t5-b": _spec(24, 3, 2, 8, gate=False, tied=False, bias_in=range(3)),
}


def text() -> Rows:
    return [((17 * s + 29 * p + 5) % N_VOCAB, p, s) for s, n in enumerate(TEXTS) for p in range(n)]


def batches() -> list[Rows]:
    """Of the decoder."""
    done = [0] * len(TEXTS)
    out = []
    for counts in BATCHES:
        out.append([((31 * s + 23 * p + 11) % N_VOCAB, p, s) for s, n in enumerate(counts) for p in range(done[s], done[s] + n)])
        done = [a + b for a, b in zip(done, counts)]
    return out
