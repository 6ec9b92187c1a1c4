"""What tests of sampling draw from: rows of logits, a vocabulary of bytes, and the draws."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggraph.sampling import Sampler
from ggraph.sampling.candidates import Candidates

F32 = NDArray[np.float32]
GOLDEN = json.loads((Path(__file__).parents[1] / "golden/samplers.json").read_text())
EVERYTHING = ("logit_bias 1 2;penalties 8 1.2 0.1 0.1;dry 0.8 1.75 2 16;top_n_sigma 3;top_k 30;typical 0.99;top_p 0.99;"
              "min_p 0.001;xtc 0.5 0.1 3;temp_ext 1 0.5 1;")
PICKERS = ["greedy", "dist 5", "mirostat 5 3 0.1 100", "mirostat_v2 5 3 0.1", "adaptive_p 0.4 0.9 5"]


class Pieces:
    """A vocabulary of bytes; text is encoded byte by byte, through the first piece that holds just this byte."""

    def __init__(self, pieces: list[bytes]):
        self.pieces = pieces
        self.n_vocab = len(pieces)
        self.asked = 0

    def piece(self, id: int) -> bytes:
        self.asked += 1
        return self.pieces[id]

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        return [self.pieces.index(bytes([b])) for b in text.encode()]


SMOLLM2 = Pieces([bytes.fromhex(p) for p in GOLDEN["pieces"]])
LETTERS = Pieces([bytes([97 + i]) if i < 6 else b"-" for i in range(1500)])      # tokens 0..5 are a..f


def frozen(x: Any) -> F32:
    row = np.array(x, np.float32)
    row.flags.writeable = False
    return row


def some_rows(seed: int = 0, n: int = 12, n_vocab: int = 60) -> F32:
    rows = np.random.RandomState(seed).standard_normal((n, n_vocab)) * 2
    rows[:, :6] += 3    # a few likely tokens: repetitions and penalties happen
    return frozen(rows)


def draw(sampler: Sampler, rows: F32) -> list[int]:
    tokens = []
    for row in rows:
        tokens.append(sampler.sample(row))
        sampler.accept(tokens[-1])
    return tokens


def left(chain: str, row: F32) -> tuple[list[int], F32]:
    """Tokens and logits that are left just before the pick."""
    sampler, c = Sampler(chain, len(row)), Candidates(row)
    for step in sampler._steps[:-1]:
        step.run(c)
    return [c.token(i) for i in range(len(c))], c.logits
